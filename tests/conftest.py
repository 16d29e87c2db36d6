"""Process-wide settings, made before jax is imported."""

import os

# XLA's CPU backend then compiles the simulator's event loop as one native function, not one thunk
# per operation: the loop's body is small, and dispatch would dominate.
# Eight virtual devices make a mesh.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000 "
    "--xla_force_host_platform_device_count=8",
)
