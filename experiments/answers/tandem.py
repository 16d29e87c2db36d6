"""First come, first served through a few equal servers: what predictions about lab 23 rest on."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def ends(ready: Sequence[float], services: Sequence[float], servers: int) -> list[float]:
    """When each job leaves, in the order given, if the first free server takes the first ready job.

    Args:
      ready: when each job may start; jobs are served in the order of these times.
      services: how long each takes.
    """
    free = [0.0] * servers
    left = [0.0] * len(ready)
    for i in np.argsort(ready, kind="stable"):
        start = max(ready[i], heapq.heappop(free))
        left[i] = start + services[i]
        heapq.heappush(free, left[i])
    return left
