"""Cache formats against ml_dtypes' casts, against bytes worked out by hand, and against two peers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import formats as F

NAMES = ("e4m3", "mxfp4", "fp4_e4m3")
GROUP = {"e4m3": 32, "mxfp4": 32, "fp4_e4m3": 16}
LARGEST = {"e4m3": 448.0, "mxfp4": 6.0, "fp4_e4m3": 6.0}
FLOOR = {"e4m3": 1e-4, "mxfp4": 6 * 2.0**-126, "fp4_e4m3": 6 * 2.0**-9}

FAKE = {name: jax.jit(getattr(F, f"fake_{name}")) for name in NAMES}
ENCODE = {name: jax.jit(getattr(F, f"encode_{name}")) for name in NAMES}
DECODE = {name: jax.jit(getattr(F, f"decode_{name}")) for name in NAMES}
REENCODE = dict(ENCODE, fp4_e4m3=jax.jit(lambda x: F.encode_fp4_e4m3(x, rounded=True)))


def reference(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(values, element codes one a byte, scale bytes) of finite x [groups, group], in float64."""
    largest = np.float32(LARGEST[name])
    amax = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(FLOOR[name]))
    target = (amax * (np.float32(1) / largest)).astype(np.float32)
    if name == "fp4_e4m3":
        scale = np.minimum(target, 448).astype(ml_dtypes.float8_e4m3fn)
    else:
        mantissa, exponent = np.frexp(target.astype(np.float64))
        power = np.where(mantissa == 0.5, exponent - 1, exponent)
        scale = np.ldexp(1.0, power).astype(ml_dtypes.float8_e8m0fnu)
    element = ml_dtypes.float8_e4m3fn if name == "e4m3" else ml_dtypes.float4_e2m1fn
    quotient = np.clip(x.astype(np.float64) / scale.astype(np.float64), -largest, largest)
    rounded = quotient.astype(element)
    values = rounded.astype(np.float64) * scale.astype(np.float64)
    return values, rounded.view(np.uint8), scale.view(np.uint8)[:, 0]


def bytes_of(codes: np.ndarray, name: str) -> np.ndarray:
    """Codes one a byte -> as stored."""
    return codes if name == "e4m3" else codes[:, 0::2] | codes[:, 1::2] << 4


def sample(name: str, groups: int = 512, seed: int = 0) -> np.ndarray:
    """Groups of many magnitudes, some with few mantissa bits, so that ties occur."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(groups, GROUP[name])) * 2.0 ** rng.integers(-20, 12, (groups, 1))
    x = x.astype(np.float32)
    x[::2] = x[::2].astype(ml_dtypes.bfloat16)
    x[::8] = x[::8].astype(ml_dtypes.float8_e5m2).astype(np.float32)
    x[1::8, ::3] = 0
    # Exact ties under every significand of a scale.
    scale = np.arange(8, 16) / 8 if name == "fp4_e4m3" else np.ones(8)
    ties = [17, 19, 2.0**-10, 1.5 * 2.0**-9] if name == "e4m3" else [0.25, 0.75, 1.25, 1.75]
    ties += [224 + 8, 416] if name == "e4m3" else [2.5, 3.5, 5]
    x[2:18:2] = 0
    x[2:18:2, 0] = LARGEST[name] * scale
    x[2:18:2, 1 : 1 + len(ties)] = np.outer(scale, ties)
    return x


def assert_bytes(x: np.ndarray, name: str) -> None:
    """Bytes and values of x are the reference's, signs of zeros included."""
    values, codes, scales = reference(x, name)
    got_codes, got_scales = ENCODE[name](x)
    np.testing.assert_array_equal(got_scales[:, 0], scales)
    np.testing.assert_array_equal(got_codes, bytes_of(codes, name))
    np.testing.assert_array_equal(FAKE[name](x), values)
    np.testing.assert_array_equal(np.signbit(FAKE[name](x)), np.signbit(values))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_ml_dtypes_casts(name: str) -> None:
    assert_bytes(sample(name), name)


@pytest.mark.parametrize("name", NAMES)
def test_any_bits_within_sixty_octaves(name: str) -> None:
    """Any significand and sign, wide groups; the ends of the range have tests of their own."""
    rng = np.random.default_rng(8)
    bits = rng.integers(0, 2**23, (512, GROUP[name])) | rng.integers(67, 187, (512, 1)) << 23
    bits += rng.integers(-12, 1, bits.shape) << 23
    x = bits.astype(np.int32).view(np.float32) * rng.choice([-1, 0, 1], bits.shape)
    assert_bytes(x.astype(np.float32), name)


@pytest.mark.parametrize("name", NAMES)
def test_every_significand_of_the_largest_magnitude(name: str) -> None:
    """All 2^12 leading significands in one octave, the powers of two and their neighbours."""
    steps = np.arange(2**12, dtype=np.int64) << 11
    edges = np.array([0, 1, 2, 2**23 - 1, 2**23 - 2], np.int64)
    lead = (np.concatenate([steps, edges]) + (127 << 23)).astype(np.int32).view(np.float32)
    x = np.zeros((len(lead), GROUP[name]), np.float32)
    x[:, 0], x[:, 1], x[:, 2] = lead, -lead / 3, lead / 1000
    assert_bytes(x, name)


def group_of(name: str, *head: float) -> np.ndarray:
    """One group that begins with `head`, zeros behind."""
    x = np.zeros((1, GROUP[name]), np.float32)
    x[0, : len(head)] = head
    return x


def test_e4m3_bytes_by_hand() -> None:
    cases = [
        # 448 * 2^k fills the range at scale 2^k; sign bit 0x80; 2^-9 is the smallest value.
        ((448.0, -448.0, 1.0, 2.0**-9), 127, (0x7E, 0xFE, 0x38, 0x01)),
        ((1792.0, 4.0), 129, (0x7E, 0x38)),
        # The next float above 448 asks for scale 2, under which it rounds to 224.
        ((np.nextafter(np.float32(448), np.float32(449)), 2.0), 128, (0x76, 0x38)),
        # 1e-4 / 448 lies in (2^-23, 2^-22]: a group of zeros has scale byte 127 - 22.
        ((0.0, -0.0), 105, (0x00, 0x80)),
        ((2.0**-22, 2.0**-31, 2.0**-32, 3 * 2.0**-32), 105, (0x38, 0x01, 0x00, 0x02)),
        # Ties go to the even code: 17 between 16 and 18, 19 between 18 and 20.
        ((448.0, 17.0, 19.0, -17.0), 127, (0x7E, 0x58, 0x5A, 0xD8)),
        ((2.0**127,), 246, (0x78,)),
    ]
    for head, scale, want in cases:
        codes, scales = ENCODE["e4m3"](group_of("e4m3", *head))
        assert scales.tolist() == [[scale]], head
        assert tuple(codes[0, : len(want)].tolist()) == want, head


def test_mxfp4_bytes_by_hand() -> None:
    cases = [
        # Even element in the low half: (6, -6) is 0xF7.
        ((6.0, -6.0, 1.0, 0.5), 127, (0xF7, 0x12)),
        ((24.0, 4.0), 129, (0x27,)),
        # .25 1.25 2.5 5 go down, .75 1.75 3.5 go up: always to the even code.
        ((6.0, 0.25, 1.25, 2.5, 5.0, 0.75, 1.75, 3.5), 127, (0x07, 0x42, 0x26, 0x64)),
        ((6.0, -0.25, -0.75, -5.0), 127, (0x87, 0xEA)),
        # Just above 6: scale 2, value 3.
        ((np.nextafter(np.float32(6), np.float32(7)),), 128, (0x05,)),
        ((0.0, -0.0), 1, (0x80,)),
        ((2.0**-126, 6 * 2.0**-126), 1, (0x72,)),
        ((2.0**127,), 252, (0x06,)),  # 2^127 / 6 lies in (2^124, 2^125]; 4 * 2^125
    ]
    for head, scale, want in cases:
        codes, scales = ENCODE["mxfp4"](group_of("mxfp4", *head))
        assert scales.tolist() == [[scale]], head
        assert tuple(codes[0, : len(want)].tolist()) == want, head


def test_fp4_e4m3_bytes_by_hand() -> None:
    cases = [
        ((6.0, -6.0, 1.0, 0.5), 0x38, (0xF7, 0x12)),
        # 6.3 / 6 = 1.05 rounds to 1 (the next is 1.125), so 6.3 saturates.
        ((6.3, -6.3), 0x38, (0xF7,)),
        # 7.5 / 6 = 1.25: an exact scale that is no power of two. 1.5625 / 1.25 = 1.25 ties down.
        ((7.5, 1.5625, 0.9375, 2.1875), 0x3A, (0x27, 0x42)),
        # Exact ties under 15/8, whose float32 reciprocal would push them up.
        ((11.25, 1.25 * 1.875, 2.5 * 1.875, 5 * 1.875), 0x3F, (0x27, 0x64)),
        ((0.0, -0.0), 0x01, (0x80,)),
        ((6 * 2.0**-9, 2.0**-9), 0x01, (0x27,)),
        ((1e30, -1e30, 448.0), 0x7E, (0xF7, 0x02)),  # scales end at 448
    ]
    for head, scale, want in cases:
        codes, scales = ENCODE["fp4_e4m3"](group_of("fp4_e4m3", *head))
        assert scales.tolist() == [[scale]], head
        assert tuple(codes[0, : len(want)].tolist()) == want, head


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bytes_hold_what_rounding_gives(name: str, dtype: jnp.dtype) -> None:
    x = jnp.asarray(sample(name, seed=1)).astype(dtype)
    fake = FAKE[name](x)
    assert fake.dtype == dtype
    codes, scales = ENCODE[name](x)
    got = jax.jit(getattr(F, f"decode_{name}"), static_argnums=2)(codes, scales, dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, fake)
    # A value and its rounding are bytes of one meaning, and rounding it again changes no byte.
    again = REENCODE[name](fake)
    np.testing.assert_array_equal(DECODE[name](*again), fake.astype(jnp.float32))
    twice = REENCODE[name](DECODE[name](*again))
    for one, two in zip(again, twice, strict=True):
        np.testing.assert_array_equal(one, two)


def test_small_fp4_e4m3_groups_are_packed_as_rounded() -> None:
    """9.5 steps of 2^-9: scale 2 steps, value 4 * 2; a fresh look at 8 steps would clip to 6."""
    x = group_of("fp4_e4m3", 9.5 * 2.0**-9)
    fake = FAKE["fp4_e4m3"](x)
    assert fake[0, 0] == 8 * 2.0**-9
    assert FAKE["fp4_e4m3"](fake)[0, 0] == 6 * 2.0**-9
    np.testing.assert_array_equal(DECODE["fp4_e4m3"](*REENCODE["fp4_e4m3"](fake)), fake)


def test_every_rounded_fp4_e4m3_group_survives_packing() -> None:
    """Largest magnitudes around every E4M3 scale and every midpoint between two."""
    scales = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    lead = np.concatenate([scales, (scales[1:] + scales[:-1]) / 2]) * 6
    lead = np.concatenate([lead, np.nextafter(lead, 0), np.nextafter(lead, np.float32(9e9))])
    x = np.zeros((len(lead), 16), np.float32)
    x[:, 0], x[:, 1:] = lead, lead[:, None] * np.linspace(-1, 1, 15)
    fake = FAKE["fp4_e4m3"](x)
    np.testing.assert_array_equal(DECODE["fp4_e4m3"](*REENCODE["fp4_e4m3"](fake)), fake)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_with_no_finite_answer_is_nan_throughout(name: str) -> None:
    for bad in (np.nan, np.inf, -np.inf, -np.nan):
        x = np.full((2, GROUP[name]), LARGEST[name], np.float32)
        x[0, 3] = bad
        codes, scales = ENCODE[name](x)
        assert scales[0, 0] == (0x7F if name == "fp4_e4m3" else 0xFF)
        for got in (FAKE[name](x), DECODE[name](codes, scales)):
            assert np.isnan(got[0]).all() and (got[1] == x[1]).all()


def test_a_magnitude_beyond_the_largest_float_becomes_infinite() -> None:
    x = group_of("e4m3", float(np.finfo(np.float32).max))  # 256 * 2^120 = 2^128
    assert np.isposinf(FAKE["e4m3"](x)[0, 0])
    assert np.isposinf(DECODE["e4m3"](*ENCODE["e4m3"](x))[0, 0])


def test_all_bytes_decode() -> None:
    every = np.arange(256, dtype=np.uint8)
    ones = np.full((8, 1), 127, np.uint8)
    want = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    got = DECODE["e4m3"](every.reshape(8, 32), ones).reshape(-1)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))

    halves = np.stack([every & 15, every >> 4], -1).view(ml_dtypes.float4_e2m1fn)
    got = DECODE["mxfp4"](every.reshape(16, 16), np.full((16, 1), 127, np.uint8))
    want = halves.astype(np.float32).reshape(16, 32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_all_scale_bytes_decode() -> None:
    every = np.arange(256, dtype=np.uint8)[:, None]
    one = np.zeros((256, 32), np.uint8)
    one[:, 0], one[:, 1] = 0x40, 0x70  # 2 and 128
    want = every.view(ml_dtypes.float8_e8m0fnu).astype(np.float64) * np.array([2, 128])
    with np.errstate(over="ignore"):
        want = want.astype(np.float32)
    np.testing.assert_array_equal(DECODE["e4m3"](one, every)[:, :2], want)

    two = np.zeros((256, 8), np.uint8)
    two[:, 0] = 0x42  # 1, then 2
    want = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.array([1, 2], np.float32)
    np.testing.assert_array_equal(DECODE["fp4_e4m3"](two, every)[:, :2], want)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_passes_through(name: str) -> None:
    x = jnp.asarray(sample(name, groups=32))
    weight = jnp.asarray(np.random.default_rng(2).normal(size=x.shape), jnp.float32)
    fake = getattr(F, f"fake_{name}")
    value, gradient = jax.jit(jax.value_and_grad(lambda v: jnp.sum(fake(v) * weight)))(x)
    np.testing.assert_array_equal(gradient, weight)
    np.testing.assert_allclose(value, np.sum(FAKE[name](x) * weight), rtol=1e-5)


def test_a_width_that_no_group_divides_is_refused() -> None:
    with pytest.raises(ValueError, match="last axis is 48; 32 channels share a scale"):
        F.fake_e4m3(jnp.zeros((2, 48)))


def test_rows_interleave_data_and_scales() -> None:
    """The released row sizes: 528 bytes for 512 channels in E4M3, 288 in FP4."""
    x = np.random.default_rng(3).normal(size=(5, 512)).astype(np.float32)
    cases: list[tuple[str, int, int, Callable, Callable]] = [
        ("e4m3", 528, 512, F.pack_row_e4m3, F.unpack_row_e4m3),
        ("fp4_e4m3", 288, 256, F.pack_row_fp4_e4m3, F.unpack_row_fp4_e4m3),
    ]
    for name, width, data, pack, unpack in cases:
        fake = FAKE[name](x)
        row = jax.jit(pack)(fake)
        assert row.shape == (5, width) and row.dtype == jnp.uint8
        codes, scales = REENCODE[name](fake)
        np.testing.assert_array_equal(row[:, :data], codes)
        np.testing.assert_array_equal(row[:, data:], scales)
        np.testing.assert_array_equal(jax.jit(unpack)(row), fake)


def test_pages_of_keys_have_two_sections() -> None:
    """64 keys of 128 channels: 64 * 64 bytes of data, then 64 * 4 of scales, 4,352 in all."""
    x = np.random.default_rng(4).normal(size=(2, 64, 128)).astype(np.float32)
    codes, scales = ENCODE["mxfp4"](x)
    page = np.asarray(F.pack_page(codes, scales))
    assert page.shape == (2, 4352)
    np.testing.assert_array_equal(page[1, 63 * 64 : 64 * 64], codes[1, 63])
    np.testing.assert_array_equal(page[1, 4096:4100], scales[1, 0])
    back = F.unpack_page(jnp.asarray(page), rows=64, scale_bytes=4)
    np.testing.assert_array_equal(DECODE["mxfp4"](*back), FAKE["mxfp4"](x))


@pytest.mark.parametrize("shape", [(64, 96), (40, 70)])
def test_weights_in_square_blocks(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(5)
    weight = (rng.normal(size=shape) * 2.0 ** rng.integers(-9, 9, shape)).astype(np.float32)
    codes, scales = jax.jit(F.encode_fp8_blocks)(weight)
    assert codes.shape == shape and scales.shape == tuple(-(-n // 32) for n in shape)
    got = jax.jit(F.decode_fp8_blocks)(codes, scales)
    for i, j in np.ndindex(*scales.shape):
        at = np.s_[32 * i : 32 * i + 32, 32 * j : 32 * j + 32]
        tile = weight[at]
        values, element, scale = reference(tile.reshape(1, -1), "e4m3")
        assert scales[i, j] == scale[0]
        np.testing.assert_array_equal(codes[at], element.reshape(tile.shape))
        np.testing.assert_array_equal(got[at], values.reshape(tile.shape))


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bfloat16", [False, True])
def test_nemo_rounds_alike(name: str, bfloat16: bool) -> None:
    torch = pytest.importorskip("torch")
    nemo = pytest.importorskip("nemo_automodel.components.models.deepseek_v41.quantization")
    x = sample(name, seed=6)
    if bfloat16:
        x = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    form = {"e4m3": "fp8", "mxfp4": "mxfp4", "fp4_e4m3": "nvfp4"}[name]
    want = nemo.quantize_cache(torch.from_numpy(x), format=form, block_size=GROUP[name])
    np.testing.assert_array_equal(FAKE[name](x), want.numpy())


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_mlx_rounds_alike(name: str) -> None:
    mx = pytest.importorskip("mlx.core")
    peer = pytest.importorskip("mlx_lm.models.deepseek_v41")
    x = sample(name, seed=7)
    if name == "e4m3":
        want = peer._fake_quant_fp8(mx.array(x), 32)
    else:
        scale = name == "fp4_e4m3"
        want = peer._fake_quant_fp4(mx.array(x), block_size=GROUP[name], e4m3_scale=scale)
    np.testing.assert_array_equal(FAKE[name](x), np.array(want))


def test_values_of_codes_are_those_of_ml_dtypes() -> None:
    byte = np.arange(256)
    for value, codes, kind in (
        (F.e4m3_value, byte, ml_dtypes.float8_e4m3fn),
        (F.e2m1_value, byte[:16], ml_dtypes.float4_e2m1fn),
        (F.e8m0_value, byte[1:], ml_dtypes.float8_e8m0fnu),  # 0 is a subnormal float32
    ):
        made = value(jnp.asarray(codes, jnp.int32))
        np.testing.assert_array_equal(made, codes.astype(np.uint8).view(kind).astype(np.float32))
