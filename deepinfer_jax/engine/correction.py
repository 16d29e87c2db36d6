"""Lengths of a step whose predecessor is in flight: the host's bound, the device's value.

The host counts nextn + 1 rows for the step in flight; of them accepted + 1 advance the request.
"""

from __future__ import annotations

from typing import Any


def device_k(k0: Any, q: Any, nextn: int, accepted: Any) -> Any:
    """Key length of a remapped row: k0 + q - (nextn - accepted).

    Host bound 332 = 326 + 6, two of five drafts accepted: 329 (the chapter, section 11.8). Ints,
    or integer arrays of one shape.

    Args:
      k0: `PlanRow.start`, committed length plus rows in flight.
      q: rows of this step, as the device splits them.
      nextn: drafts proposed per step.
      accepted: drafts of the previous step that were accepted, a stop among them or not.
    """
    return k0 + q - (nextn - accepted)


def exact_k(q: int, proc: int) -> int:
    """Key length once the previous step is committed: q new rows behind `proc` positions.

    Equal to `device_k`, unless the request ended inside the accepted drafts; its step is obsolete.
    """
    return q + proc
