"""Prefill or decode: the vote of a data-parallel group's ranks, as pure functions.

All ranks take the same kind of step, for experts are exchanged between them, so a prompt on one
rank stops the decoding of all. Every `interval`-th decode step they prefill if all ranks have a
prompt to start; every `any_interval`-th if one has. `decode_step` counts the decode steps since the
last prompt step. Source: the released DeepInfer 0.1.0; the rule for an idle group is ours.
"""

from __future__ import annotations

from collections.abc import Sequence


def prefill_vote(
    decode_step: int,
    wants: Sequence[bool],
    decoding: Sequence[bool],
    interval: int,
    any_interval: int,
) -> bool:
    """Whether the group tries a prompt step now.

    At step 0, straight behind a prompt step, all must want it; where both intervals end, one is
    enough. A group that decodes nothing has no reason to wait.

    Args:
      decode_step: the common counter.
      wants: per rank, whether it has a prompt that may start.
      decoding: per rank, whether it has a request to decode.
      interval, any_interval: decode steps.
    """
    if not any(decoding) or (decode_step and decode_step % any_interval == 0):
        return any(wants)
    return decode_step % interval == 0 and all(wants)


def prefill_confirmed(planned_rows: Sequence[int]) -> bool:
    """The second vote: whether any rank could plan a row; else the group decodes after all.

    Without it a prompt that no rank can admit would bring on prompt steps without end.
    """
    return any(planned_rows)
