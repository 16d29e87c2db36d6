"""Our own checkpoints: same numbers back, damage refused, an interruption harmless."""

import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.checkpoint.native import restore, save
from deepinfer_jax.presets import tiny
from tests.oracle.random_weights import random_parameters

ROOT = pathlib.Path(__file__).parents[2]
KILLED = """
import os, signal, sys, jax
from deepinfer_jax.checkpoint import native
from deepinfer_jax.presets import tiny
from tests.oracle.random_weights import random_parameters
native._replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
native.save(sys.argv[1], jax.tree.map(jax.numpy.asarray, random_parameters(tiny(), 1)), tiny())
"""
MESH = """
import sys, jax
from deepinfer_jax.checkpoint.native import restore
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import shardings
from deepinfer_jax.presets import tiny
mesh = jax.make_mesh((8,), ("x",))
places = shardings(model_parameters(tiny()), mesh, {"experts": "x", "vocab": "x"})
params, _ = restore(sys.argv[1], {**places, "draft": {**places["draft"], "layers":
    shardings(model_parameters(tiny()), mesh, {})["draft"]["layers"]}})
assert params["embed"].addressable_shards[0].data.shape == (8, 64)
assert params["layers"][0]["moe"]["down"].addressable_shards[7].data.shape[0] == 1
"""


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, random_parameters(tiny(), 0))


def child(script, directory):
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    return subprocess.run(
        [sys.executable, "-c", script, str(directory)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )


def test_restores_alone_to_a_mesh_and_after_a_killed_save(params, tmp_path):
    save(tmp_path / "c", params, tiny())
    assert child(KILLED, tmp_path / "c").returncode == -signal.SIGKILL
    read, config = restore(tmp_path / "c")
    assert config == tiny()
    jax.tree.map(np.testing.assert_array_equal, read, params)
    done = child(MESH, tmp_path / "c")
    assert done.returncode == 0, done.stderr
    save(tmp_path / "c", params, tiny())
    assert len(list((tmp_path / "c").glob("arrays-*"))) == 1


def test_damage_is_refused(params, tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint\.json cannot be read"):
        restore(tmp_path)
    assert child(KILLED, tmp_path / "new").returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match=r"checkpoint\.json cannot be read"):
        restore(tmp_path / "new")
    save(tmp_path / "c", params, tiny())
    victim = max((p for p in (tmp_path / "c").rglob("*") if p.is_file()), key=os.path.getsize)
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is incomplete: 1 files"):
        restore(tmp_path / "c")
