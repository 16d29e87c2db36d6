"""Process settings that must stand before XLA first compiles; `experiments.harness` imports it.

XLA reads XLA_FLAGS at its first compilation, not when jax is imported.
"""

import os

# XLA:CPU then compiles the simulator's event loop as one native function instead of one call per
# operation: the loop's body is small, and dispatch would dominate.
OPTIONS = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"


def xla_flags(current: str) -> str:
    """`current` with our option appended, unless its owner set backend options already."""
    return current if "xla_backend_extra_options" in current else f"{current} {OPTIONS}".strip()


os.environ["XLA_FLAGS"] = xla_flags(os.environ.get("XLA_FLAGS", ""))
