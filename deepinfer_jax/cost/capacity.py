"""How many devices and storage servers a load needs, by the linear estimates used for sizing.

These suppress context-dependent cost, batch shape and group granularity: an answer is in device
equivalents, not in deployable groups (the chapter, section 11.2.1). The simulator does the rest.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

SECONDS_PER_DAY = 86_400


def _exact(value: float | Fraction) -> Fraction:
    """The decimal a caller wrote, so that 0.8 means four fifths and ceilings are not off by one."""
    return value if isinstance(value, Fraction) else Fraction(str(value))


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value!r}: a rate or share in use is positive")


def prefill_gpus(
    request_rate: float,
    input_tokens: float,
    reused_token_fraction: float,
    tokens_per_second_per_gpu: float,
    utilisation: float = 1.0,
) -> int:
    """`ceil(rate * input * (1 - reused) / (utilisation * speed))` (the chapter, section 11.2.1).

    Args:
      request_rate: requests per second.
      input_tokens: prompt tokens per request.
      reused_token_fraction: share of input *tokens* not computed. The share of requests with any
        hit is another number: a hundred requests may all hit 1 % of their tokens.
      tokens_per_second_per_gpu: sustained uncached prefill tokens.
      utilisation: target share of that speed, in (0, 1].

    Example, lab 23: 4/s of 1,024 tokens at 2,048 tokens/s and 0.8: 3, and 1 with 75 % reused.
    """
    _positive(tokens_per_second_per_gpu=tokens_per_second_per_gpu, utilisation=utilisation)
    if not 0 <= reused_token_fraction <= 1:
        raise ValueError(
            f"reused_token_fraction={reused_token_fraction!r}: give a share of tokens in [0, 1]"
        )
    work = _exact(request_rate) * _exact(input_tokens) * (1 - _exact(reused_token_fraction))
    return math.ceil(work / (_exact(utilisation) * _exact(tokens_per_second_per_gpu)))


def decode_gpus(
    request_rate: float,
    output_tokens: float,
    tokens_per_second_per_gpu: float,
    utilisation: float = 1.0,
) -> int:
    """`ceil(rate * output / (utilisation * speed))`; example, lab 23: 64 tokens at 128/s: 3."""
    _positive(tokens_per_second_per_gpu=tokens_per_second_per_gpu, utilisation=utilisation)
    work = _exact(request_rate) * _exact(output_tokens)
    return math.ceil(work / (_exact(utilisation) * _exact(tokens_per_second_per_gpu)))


def nodes_for_daily_tokens(tokens_per_day: float, tokens_per_second_per_node: float) -> float:
    """Nodes busy on average, not rounded.

    DeepSeek-V3/R1 Inference System Overview: 608e9 input tokens at 73.7e3/s and 168e9 output
    tokens at 14.8e3/s make 95.5 + 131.4 = 226.9 nodes; it reports 226.75.
    """
    _positive(tokens_per_second_per_node=tokens_per_second_per_node)
    return tokens_per_day / SECONDS_PER_DAY / tokens_per_second_per_node


@dataclasses.dataclass(frozen=True)
class StorageServer:
    """One erasure-coded KV server: drives, bytes per drive, and the code's data and parity parts.

    The defaults are the chapter's deployment notes (section 11.3): 20 SSDs of 30.73 TB, 10 + 2.
    """

    drives: int = 20
    drive_bytes: float = 30.73e12
    data_parts: int = 10
    parity_parts: int = 2

    @property
    def raw_bytes(self) -> float:
        """Bytes of all drives: 614.6 TB by default."""
        return self.drives * self.drive_bytes

    @property
    def usable_bytes(self) -> float:
        """Bytes of user data once parity is paid: 512.2 TB by default."""
        return self.raw_bytes * self.data_parts / (self.data_parts + self.parity_parts)

    def fill_rate(self, hours: float) -> float:
        """User bytes per second that fill the server in `hours`: 5.93 GB/s in 24 h by default."""
        _positive(hours=hours)
        return self.usable_bytes / (hours * 3600)

    def tokens(self, bytes_per_token: float) -> float:
        """Tokens of KV one server holds."""
        _positive(bytes_per_token=bytes_per_token)
        return self.usable_bytes / bytes_per_token


def storage_servers(
    stored_tokens_per_second: float,
    bytes_per_token: float,
    retention_hours: float,
    server: StorageServer = StorageServer(),
) -> int:
    """Servers that keep every newly written token for `retention_hours`.

    The retention goal (72 h), the sizing per server (24 h) and the time to live (3 or 7 days) are
    three numbers of the chapter that need not agree; this is the first of them.
    """
    _positive(retention_hours=retention_hours, bytes_per_token=bytes_per_token)
    kept = stored_tokens_per_second * bytes_per_token * retention_hours * 3600
    return math.ceil(kept / server.usable_bytes)
