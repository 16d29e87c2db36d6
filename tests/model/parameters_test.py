"""One declaration: counts of the released model, placement, random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from deepinfer_jax.cost.parameters import parameter_counts
from deepinfer_jax.model import parameters
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import Leaf
from deepinfer_jax.presets import small, tiny, v41_flash


@pytest.mark.parametrize("preset", [tiny, small, v41_flash])
def test_the_tree_holds_what_the_cost_model_counts(preset):
    config = preset()
    assert parameters.count(model_parameters(config)) == parameter_counts(config)["total"]


def test_the_released_sizes():
    """Report, arXiv 2609.19969: a 552 B backbone and 196 B of Engram."""
    tree = model_parameters(v41_flash())
    engram = sum(parameters.count(x["engram"]) for x in tree["layers"] if "engram" in x)
    rest = parameters.count([tree[name] for name in ("embed", "layers", "norm", "head")]) - engram
    assert rest / 1e9 == pytest.approx(551.5, abs=0.1)
    assert engram / 1e9 == pytest.approx(196.6, abs=0.4)


def test_released_shapes():
    tree = parameters.abstract(model_parameters(v41_flash()))
    layer = tree["layers"][20]
    shapes = {
        ("attn", "wq_a"): (1280, 5120),
        ("attn", "wq_b"): (32768, 1280),
        ("attn", "wkv"): (512, 5120),
        ("attn", "wo_a"): (8, 1024, 4096),
        ("attn", "wo_b"): (5120, 8192),
        ("attn_mix", "fn"): (24, 20480),
        ("indexer", "wq_b"): (4096, 1280),
        ("indexer", "wk"): (128, 512),
        ("moe", "router"): (384, 5120),
    }
    for (part, name), shape in shapes.items():
        assert layer[part][name].shape == shape
    assert "wgate" not in layer["compressor"] and "wgate" in tree["layers"][2]["compressor"]
    assert layer["attn"]["sink"].dtype == jnp.float32 and layer["attn_norm"].dtype == jnp.bfloat16
    assert tree["draft"]["main_proj"].shape == (5120, 15360)
    assert tree["draft"]["confidence"].shape == (5376,)


def test_placement_follows_the_rules():
    tree = model_parameters(tiny())
    rules = {"experts": "expert", "vocab": ("data", "expert"), "engram_rows": "data"}
    specs = parameters.partitions(tree, rules)
    assert specs["layers"][0]["moe"]["gate_up"] == PartitionSpec("expert", None, None)
    assert specs["head"] == PartitionSpec(("data", "expert"), None)
    assert specs["layers"][1]["engram"]["table"] == PartitionSpec("data", None)
    assert specs["norm"] == PartitionSpec(None)


def test_one_mesh_axis_cuts_a_weight_once():
    leaf = Leaf((4, 4), ("experts", "hidden"))
    with pytest.raises(ValueError, match="one mesh axis may cut a weight once"):
        parameters.partitions(leaf, {"experts": "x", "hidden": "x"})


def test_each_dimension_has_a_name():
    with pytest.raises(ValueError, match="name each dimension"):
        Leaf((4, 4), ("experts",))


def test_random_weights():
    tree = {
        "a": Leaf((400, 100), (None, None)),
        "b": Leaf((400, 100), (None, None)),
        "n": Leaf((7,), (None,), "ones", jnp.float32),
    }
    made = parameters.initialise(tree, jax.random.key(3), jnp.bfloat16)
    assert made["a"].dtype == jnp.bfloat16 and made["n"].dtype == jnp.float32
    assert np.std(np.asarray(made["a"], np.float32)) == pytest.approx(0.1, rel=0.02)
    assert not np.array_equal(made["a"], made["b"])
    assert np.array_equal(made["n"], np.ones(7))
    again = parameters.initialise(tree, jax.random.key(3), jnp.bfloat16)
    assert all(np.array_equal(made[k], again[k]) for k in made)
