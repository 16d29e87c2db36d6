"""The released layout against hand-made bytes, another reader, and every kind of damage."""

import json
from collections import Counter

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from deepinfer_jax.checkpoint import elements, names
from deepinfer_jax.checkpoint.names import Kind
from deepinfer_jax.checkpoint.released import read_released, write_released
from deepinfer_jax.checkpoint.released_config import released_config, write_released_config
from deepinfer_jax.checkpoint.shards import INDEX
from deepinfer_jax.presets import tiny, v41_flash
from pallas_kernels import formats
from tests.oracle.random_weights import random_parameters

CONFIG = tiny()


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, random_parameters(CONFIG, 0))


@pytest.fixture
def directory(params, tmp_path):
    write_released(params, CONFIG, tmp_path / "c", shard_bytes=100_000)
    return tmp_path / "c"


def edit_index(directory, change):
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def squares(x):
    """32 x 32 squares rounded under one scale each, by the rows' rounding."""
    out, width = x.shape
    tiles = x.reshape(out // 32, 32, width // 32, 32).swapaxes(1, 2).reshape(-1, 1024)
    rounded = formats.fake_e4m3(tiles, 1024).reshape(out // 32, width // 32, 32, 32)
    return rounded.swapaxes(1, 2).reshape(out, width)


def test_reading_back_gives_the_rounded_weights(params, directory):
    read = read_released(directory, dtype=jnp.float32)
    assert jax.tree.structure(read) == jax.tree.structure(params)
    layer, got = params["layers"][1], read["layers"][1]
    np.testing.assert_array_equal(got["moe"]["down"], formats.fake_mxfp4(layer["moe"]["down"]))
    np.testing.assert_array_equal(
        got["moe"]["gate_up"], formats.fake_mxfp4(layer["moe"]["gate_up"])
    )
    np.testing.assert_array_equal(
        got["engram"]["table"], formats.fake_e4m3(layer["engram"]["table"])
    )
    np.testing.assert_array_equal(got["attn"]["wq_b"], squares(layer["attn"]["wq_b"]))
    np.testing.assert_array_equal(got["attn_mix"]["fn"], layer["attn_mix"]["fn"])
    np.testing.assert_array_equal(
        read["embed"], params["embed"].astype(jnp.bfloat16).astype(jnp.float32)
    )


def test_decoding_equals_ml_dtypes():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 127, (40, 64), np.uint8)
    scales = rng.integers(100, 150, (2, 2), np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    factor = np.kron(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), np.ones((32, 32)))
    got = elements.decode(Kind.FP8_SQUARES, codes, scales)
    np.testing.assert_array_equal(got, values * factor[:40])
    low_nibble_first = elements.decode(
        Kind.FP4_ROWS, np.full((1, 16), 0x72, np.uint8), np.full((1, 1), 128, np.uint8)
    )
    np.testing.assert_array_equal(low_nibble_first[0, :4], [2.0, 12.0, 2.0, 12.0])


def test_another_reader_finds_the_names(directory):
    shard = sorted(directory.glob("*.safetensors"))[0]
    with safe_open(shard, framework="numpy") as file:
        names = set(file.keys())
    assert names <= json.loads((directory / INDEX).read_text())["weight_map"].keys()
    assert len(list(directory.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("name", ["layers.2.attn.wq_a.scale", "layers.3.ffn.experts.5.w3.weight"])
def test_a_missing_tensor_is_named(directory, name):
    edit_index(directory, lambda places: places.pop(name))
    with pytest.raises(ValueError, match=f"{name} is missing"):
        read_released(directory)


def test_an_unexpected_a_moved_and_a_mixed_name(directory):
    def change(places):
        files = sorted(set(places.values()))
        places["extra.weight"] = files[0]
        places["norm.weight"] = next(f for f in files if f != places["norm.weight"])
        places["model.embed.weight"] = places.pop("embed.weight")

    edit_index(directory, change)
    with pytest.raises(ValueError) as error:
        read_released(directory)
    for text in ("extra.weight is unexpected", "norm.weight is not in", "embed.weight is with"):
        assert text in str(error.value)


def test_a_file_cut_short_names_its_last_tensor(directory):
    shard = sorted(directory.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"lies outside model-00001.*cut short"):
        read_released(directory)


@pytest.mark.parametrize(
    ("old", "new"), [(b'"BF16"', b'"I8"  '), (b'"F32"', b'"F64"')], ids=["bf16", "f32"]
)
def test_a_wrong_dtype_is_named(directory, old, new):
    for shard in directory.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes().replace(old, new))
    with pytest.raises(ValueError, match="expected"):
        read_released(directory)


def test_the_prefix_may_be_on_every_name(directory, params):
    plain = read_released(directory)
    for shard in directory.glob("*.safetensors"):
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        text = json.dumps({"model." + name: value for name, value in header.items()}).encode()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    index = json.loads((directory / INDEX).read_text())["weight_map"]
    prefixed = {"model." + name: file for name, file in index.items()}
    (directory / INDEX).write_text(json.dumps({"weight_map": prefixed}))
    jax.tree.map(np.testing.assert_array_equal, plain, read_released(directory))


def test_v41_flash_has_the_released_tensors():
    tensors = [t for w in names.flat(v41_flash()) for p in w.parts for t in p.tensors]
    assert len({t.name for t in tensors}) == len(tensors)
    ends = Counter(".".join(t.name.split(".")[2:]) for t in tensors if t.name[0] == "l")
    assert ends["attn.compressor.wkv.weight"] == 4 and ends["attn.compressor.wgate.weight"] == 3
    assert ends["attn.indexer.weights_proj.weight"] == 8 and ends["attn.indexer.wk.weight"] == 4
    experts = [t for t in tensors if ".experts." in t.name]
    assert len(experts) == 2 * 3 * (384 * 40 + 128 * 3)
    shapes = {t.name: t.shape for t in tensors}
    assert shapes["layers.0.attn.wo_a.weight"] == (8192, 4096)
    assert shapes["layers.1.engram.embed.scale"] == (384_006_168, 8)
    assert shapes["mtp.2.confidence_head.proj.weight"] == (1, 5376)


@pytest.mark.parametrize("config", [tiny(), v41_flash()], ids=["tiny", "v41"])
def test_config_json_round_trip_and_required_values(config, tmp_path):
    write_released_config(config, tmp_path)
    assert released_config(tmp_path) == config
    data = json.loads((tmp_path / "config.json").read_text())
    data["quantization_config"]["scale_fmt"] = "float"
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"quantization_config\.scale_fmt = 'float'"):
        released_config(tmp_path)
