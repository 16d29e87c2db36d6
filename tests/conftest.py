"""Process-wide settings, made before jax is imported."""

import os

import pytest

# XLA's CPU backend then compiles the simulator's event loop as one native function, not one thunk
# per operation: the loop's body is small, and dispatch would dominate.
# Eight virtual devices make a mesh.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000 "
    "--xla_force_host_platform_device_count=8",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `--dist loadgroup` a file stays on one worker, and so do all users of a warm device.

    What a fixture compiles is then compiled once per run, not once per worker.
    """
    for item in items:
        warm = "device" in getattr(item, "fixturenames", ())
        group = "warm device" if warm else item.nodeid.split("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
