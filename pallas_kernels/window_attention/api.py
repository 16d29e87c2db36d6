"""Window attention by the implementation of one's choice."""

from __future__ import annotations

import jax

from pallas_kernels import choice
from pallas_kernels.softmax import Attended
from pallas_kernels.window_attention import reference, tpu


def window_attention(
    query: jax.Array,
    rows: jax.Array,
    first: jax.Array,
    last: jax.Array,
    sink: jax.Array,
    *,
    window: int,
    kernels: str = "xla",
) -> Attended:
    """See `reference.window_attention`; `kernels` is one of `choice.KERNELS`.

    Kernels want row q to see rows q .. q + `window` at most, of N <= `window` + Q.

    Raises:
      ValueError: `kernels` is unknown.
    """
    choice.check("window_attention", kernels)
    if kernels == "xla":
        return reference.window_attention(query, rows, first, last, sink)
    mode = choice.interpretation(kernels)
    return tpu.window_attention(query, rows, first, last, sink, window=window, interpret=mode)
