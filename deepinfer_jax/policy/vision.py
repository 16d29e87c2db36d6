"""Vision-encoder placement: a random machine, then its GPU with the fewest assigned patches."""

from __future__ import annotations

from deepinfer_jax.policy.view import Array, masked_argmin, namespace, nth


def patches(width: Array, height: Array, patch: int = 14) -> Array:
    """Load of an image: its width times its height in patch units, each rounded up.

    Args:
      width: pixels as the encoder sees them, any shape.
      height: pixels, the same shape.
      patch: pixels per patch side; 14 for DeepSeek-V4.1-Flash.
    """
    return -(-width // patch) * -(-height // patch)


def choose(eligible: Array, assigned: Array, draw: Array) -> Array:
    """The GPU for an image: the (draw mod machines)-th machine, then the fewest patches there.

    Source: the chapter, section 11.1.

    Args:
      eligible: bool [machines, gpus]: takes images and is up. Machines without any are not drawn.
      assigned: patches queued or running, [machines, gpus].
      draw: uniform in [0, 2**31).

    Returns:
      machine * gpus + gpu; machines * gpus when none is eligible. Ties go to the lowest GPU.
    """
    xp = namespace(eligible, assigned, draw)
    machine = nth(xp.any(eligible, axis=1), draw)
    there = eligible & (xp.arange(eligible.shape[0]) == machine)[:, None]
    return masked_argmin(there.reshape(-1), assigned.reshape(-1))
