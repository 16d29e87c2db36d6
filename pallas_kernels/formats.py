"""The three block formats of the cache and two of the checkpoint: rounding, bytes and rows.

A group of channels shares one scale. Element formats (OCP Microscaling Formats 1.0): E4M3 without
infinities, largest 448, and E2M1 = {0, .5, 1, 1.5, 2, 3, 4, 6} with a sign.

| name       | elements | group | scale of a group with largest magnitude a                        |
|------------|----------|-------|------------------------------------------------------------------|
| `e4m3`     | E4M3     | 32    | E8M0: smallest power of two >= max(a, 1e-4) / 448                |
| `mxfp4`    | E2M1     | 32    | E8M0: smallest power of two >= max(a, 6 * 2^-126) / 6            |
| `fp4_e4m3` | E2M1     | 16    | max(a, 6 * 2^-9) / 6 rounded to E4M3, at most 448                |

Rounding is to nearest, ties to the even code, saturating. `decode(*encode(x))` equals `fake(x)` bit
for bit. No division is left to XLA, which makes a product with a rounded reciprocal of it in some
programs and not in others: a / 448 and a / 6 are such products here, always, and x / scale is
rounded as the exact quotient. A group that holds a NaN or an infinity reads back as NaN throughout;
a finite magnitude that rounds beyond the largest float becomes infinite. Float32 subnormals are
zeros or not as the backend has it.

Sources: DeepSeek-V4.1-Flash `inference/kernel.py` for the scales and floors; the released DeepInfer
0.1.0 for bytes and rows. `fp4_e4m3` is NVFP4 without its second scale.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

_MAGNITUDE = 0x7FFFFFFF  # a float32 without its sign; as integers, magnitudes keep their order
_INFINITE = 0x7F800000
_BIAS = 127
_E8M0_NAN = 255


class _Element(NamedTuple):
    """A small float: n * 2^(exponent - mantissa), exponents from `least`; code = 1 byte or half."""

    mantissa: int
    least: int
    largest: float
    top: int  # largest magnitude code that is a number
    sign: int  # the sign bit


class _Format(NamedTuple):
    element: _Element
    floor: float  # least magnitude a scale is made for
    power_of_two: bool  # E8M0 scales, otherwise E4M3


_E4M3 = _Element(mantissa=3, least=-6, largest=448.0, top=0x7E, sign=0x80)
_E2M1 = _Element(mantissa=1, least=0, largest=6.0, top=0x7, sign=0x8)
_FP8 = _Format(_E4M3, 1e-4, True)
_MXFP4 = _Format(_E2M1, 6 * 2.0**-126, True)
_FP4_E4M3 = _Format(_E2M1, 6 * 2.0**-9, False)
# The one group whose rounded values ask for another scale: a / 6 rounds up from 1.5 to 2 units of
# E4M3's smallest step 2^-9, so a itself rounds to 4 * 2 steps, whose sixth rounds to 1 step.
_AMBIGUOUS = 8 * 2.0**-9
# Midpoints of E2M1, those that round up (to the even code), and the step each one adds.
_E2M1_STEPS = (
    (0.25, False, 0.5),
    (0.75, True, 0.5),
    (1.25, False, 0.5),
    (1.75, True, 0.5),
    (2.5, False, 1.0),
    (3.5, True, 1.0),
    (5.0, False, 2.0),
)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _units(x: jax.Array, element: _Element) -> tuple[jax.Array, jax.Array]:
    """(n, e): x is nearest to n * 2^(e - mantissa); n a whole float32, e a biased exponent."""
    exponent = jnp.maximum((_bits(x) & _MAGNITUDE) >> 23, element.least + _BIAS)
    inverse_step = _float((2 * _BIAS + element.mantissa - exponent) << 23)
    return lax.round(x * inverse_step, lax.RoundingMethod.TO_NEAREST_EVEN), exponent


def _round(x: jax.Array, element: _Element) -> jax.Array:
    """Values of `element` nearest to x, saturating."""
    n, exponent = _units(x, element)
    y = n * _float((exponent - element.mantissa) << 23)
    return jnp.clip(y, -element.largest, element.largest)


def _code(x: jax.Array, element: _Element) -> jax.Array:
    """int32 codes of the values nearest to x, saturating."""
    n, exponent = _units(x, element)
    octave = (exponent - (element.least + _BIAS)) << element.mantissa
    code = jnp.minimum(octave + jnp.abs(n).astype(jnp.int32), element.top)
    return code | jnp.where(_bits(x) < 0, element.sign, 0)


def _value(code: jax.Array, element: _Element, halvings: jax.Array | int = 0) -> jax.Array:
    """float32 values of int32 codes, divided by 2^halvings."""
    magnitude = code & (element.sign - 1)
    octave = jnp.maximum(magnitude >> element.mantissa, 1) - 1
    n = magnitude - (octave << element.mantissa)
    exponent = octave + (element.least + _BIAS - element.mantissa)
    y = n.astype(jnp.float32) * _float((exponent - halvings) << 23)
    y = jnp.where(magnitude > element.top, jnp.nan, y)
    return jnp.where((code & element.sign) != 0, -y, y)


def e4m3_value(code: jax.Array) -> jax.Array:
    """float32 values of E4M3 codes, int32 of any shape; integer arithmetic that kernels can do."""
    return _value(code, _E4M3)


def e2m1_value(code: jax.Array) -> jax.Array:
    """float32 values of E2M1 codes, int32 0 .. 15 of any shape; as `e4m3_value`."""
    small = code & 7
    magnitude = jnp.where(small < 2, small.astype(jnp.float32) * 0.5, _float((small + 252) << 22))
    return jnp.where(code >= 8, -magnitude, magnitude)


def e8m0_value(code: jax.Array) -> jax.Array:
    """float32 powers of two of E8M0 codes, int32; 255 is NaN, and 0 is as the backend has 2^-127."""
    scale = jnp.where(code == 0, _float(jnp.full_like(code, 1 << 22)), _float(code << 23))
    return jnp.where(code == _E8M0_NAN, jnp.nan, scale)


def _grouped(x: jax.Array, group: int) -> jax.Array:
    if x.shape[-1] % group:
        raise ValueError(
            f"last axis is {x.shape[-1]}; {group} channels share a scale, so make it a multiple"
        )
    return x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group)


def _scale(grouped: jax.Array, form: _Format, rounded: bool) -> tuple[jax.Array, jax.Array]:
    """(int32 scale bytes, float32 scales) of [..., groups, group] values, both [..., groups, 1]."""
    largest = jnp.max(_bits(grouped) & _MAGNITUDE, axis=-1, keepdims=True)
    floored = jnp.maximum(_float(largest), np.float32(form.floor))
    target = floored * np.float32(1 / form.element.largest)
    if form.power_of_two:
        code = ((_bits(target) - 1) >> 23) + 1
        scale = _float(code << 23)
        nan = _E8M0_NAN
    else:
        if rounded:
            target = jnp.where(floored == np.float32(_AMBIGUOUS), np.float32(2.0**-8), target)
        code, scale = _code(target, _E4M3), _round(target, _E4M3)
        nan = _E4M3.sign - 1
    lost = largest >= _INFINITE
    return jnp.where(lost, nan, code), jnp.where(lost, jnp.nan, scale)


def _quotient(grouped: jax.Array, scale: jax.Array, form: _Format) -> jax.Array:
    """A float32 that rounds to the same element as the exact grouped / scale."""
    if form.power_of_two:
        return grouped * _float((2 * _BIAS << 23) - _bits(scale))
    # A float quotient would meet ties that are none: compare with midpoint * scale, which is exact.
    magnitude, y = jnp.abs(grouped), jnp.zeros_like(grouped)
    for midpoint, up, step in _E2M1_STEPS:
        bound = midpoint * scale
        above = magnitude >= bound if up else magnitude > bound
        y = y + jnp.where(above, np.float32(step), 0)
    return jnp.copysign(y, grouped)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _fake(x: jax.Array, form: _Format, group: int) -> jax.Array:
    grouped = _grouped(x, group)
    scale = _scale(grouped, form, rounded=False)[1]
    rounded = _round(_quotient(grouped, scale, form), form.element) * scale
    return rounded.reshape(x.shape).astype(x.dtype)


@_fake.defjvp
def _fake_jvp(
    form: _Format, group: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _fake(primals[0], form, group), tangents[0]


def _encode(
    x: jax.Array, form: _Format, group: int, rounded: bool = False
) -> tuple[jax.Array, jax.Array]:
    grouped = _grouped(x, group)
    scale_code, scale = _scale(grouped, form, rounded)
    quotient = jnp.where(jnp.isnan(scale), 0.0, _quotient(grouped, scale, form))
    code = _code(quotient, form.element).reshape(x.shape)
    if form.element is _E2M1:
        code = code[..., 0::2] | (code[..., 1::2] << 4)
    return code.astype(jnp.uint8), scale_code[..., 0].astype(jnp.uint8)


def _decode(codes: jax.Array, scales: jax.Array, form: _Format, dtype: DTypeLike) -> jax.Array:
    code, scale_code = codes.astype(jnp.int32), scales.astype(jnp.int32)[..., None]
    if form.element is _E2M1:
        code = jnp.stack([code & 15, code >> 4], axis=-1).reshape(*code.shape[:-1], -1)
    grouped = code.reshape(*scales.shape, -1)
    if form.power_of_two:
        tiny = scale_code == 0  # 2^-127 is no normal float32: take the half into the values
        scale = _float(jnp.where(tiny, 1, scale_code) << 23)
        scale = jnp.where(scale_code == _E8M0_NAN, jnp.nan, scale)
        values = _value(grouped, form.element, tiny.astype(jnp.int32))
    else:
        scale, values = _value(scale_code, _E4M3), _value(grouped, form.element)
    return (values * scale).reshape(code.shape).astype(dtype)


def fake_e4m3(x: jax.Array, group: int = 32) -> jax.Array:
    """x [..., n] rounded to E4M3 under one E8M0 scale per `group`; same dtype.

    As the other two `fake_*`: x is float32 or bfloat16, arithmetic is float32, results are exact in
    bfloat16, and the gradient passes straight through.

    Raises:
      ValueError: n is no multiple of `group`.
    """
    return _fake(x, _FP8, group)


def fake_mxfp4(x: jax.Array, group: int = 32) -> jax.Array:
    """x [..., n] rounded to E2M1 under one E8M0 scale per `group`; see `fake_e4m3`."""
    return _fake(x, _MXFP4, group)


def fake_fp4_e4m3(x: jax.Array, group: int = 16) -> jax.Array:
    """x [..., n] rounded to E2M1 under one E4M3 scale per `group`; see `fake_e4m3`.

    Unlike the other two it is not idempotent: a group whose largest magnitude is between 9 and 10
    times 2^-9 rounds to 8 * 2^-9 at most, and again to 6 * 2^-9. Rounded rows are therefore packed
    with `rounded=True`.
    """
    return _fake(x, _FP4_E4M3, group)


def encode_e4m3(x: jax.Array, group: int = 32) -> tuple[jax.Array, jax.Array]:
    """x [..., n] -> (codes uint8 [..., n], E8M0 scales uint8 [..., n / group])."""
    return _encode(x, _FP8, group)


def encode_mxfp4(x: jax.Array, group: int = 32) -> tuple[jax.Array, jax.Array]:
    """x [..., n] -> (codes uint8 [..., n / 2], E8M0 scales uint8 [..., n / group]).

    The even element is in the low half byte. Also the format of FP4 expert weights [..., out, in].
    """
    return _encode(x, _MXFP4, group)


def encode_fp4_e4m3(
    x: jax.Array, group: int = 16, rounded: bool = False
) -> tuple[jax.Array, jax.Array]:
    """x [..., n] -> (codes uint8 [..., n / 2], E4M3 scales uint8 [..., n / group]).

    `rounded` says that x comes from `fake_fp4_e4m3`: then every value is kept.
    """
    return _encode(x, _FP4_E4M3, group, rounded)


def decode_e4m3(codes: jax.Array, scales: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Values [..., n] of `encode_e4m3`'s bytes; the group is n / scales.shape[-1]."""
    return _decode(codes, scales, _FP8, dtype)


def decode_mxfp4(codes: jax.Array, scales: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Values [..., n] of `encode_mxfp4`'s bytes."""
    return _decode(codes, scales, _MXFP4, dtype)


def decode_fp4_e4m3(
    codes: jax.Array, scales: jax.Array, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Values [..., n] of `encode_fp4_e4m3`'s bytes."""
    return _decode(codes, scales, _FP4_E4M3, dtype)


def pack_row_e4m3(x: jax.Array) -> jax.Array:
    """x [..., n] -> uint8 [..., n + n/32]: a row's data, then its scales (n = 512: 528 bytes)."""
    return jnp.concatenate(encode_e4m3(x), axis=-1)


def unpack_row_e4m3(row: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Values [..., n] of `pack_row_e4m3`'s bytes."""
    data = row.shape[-1] * 32 // 33
    return decode_e4m3(row[..., :data], row[..., data:], dtype)


def pack_row_fp4_e4m3(x: jax.Array) -> jax.Array:
    """x [..., n] from `fake_fp4_e4m3` -> uint8 [..., n/2 + n/16] (n = 512: 288 bytes)."""
    return jnp.concatenate(encode_fp4_e4m3(x, rounded=True), axis=-1)


def unpack_row_fp4_e4m3(row: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Values [..., n] of `pack_row_fp4_e4m3`'s bytes."""
    data = row.shape[-1] * 8 // 9
    return decode_fp4_e4m3(row[..., :data], row[..., data:], dtype)


def pack_page(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """codes [..., rows, c], scales [..., rows, s] -> [..., rows * (c + s)].

    All rows' data comes first, then all rows' scales: a page of index keys.
    """
    parts = [part.reshape(*part.shape[:-2], -1) for part in (codes, scales)]
    return jnp.concatenate(parts, axis=-1)


def unpack_page(page: jax.Array, rows: int, scale_bytes: int) -> tuple[jax.Array, jax.Array]:
    """(codes [..., rows, c], scales [..., rows, scale_bytes]) of `pack_page`'s bytes."""
    split = page.shape[-1] - rows * scale_bytes
    lead = page.shape[:-1]
    codes = page[..., :split].reshape(*lead, rows, -1)
    return codes, page[..., split:].reshape(*lead, rows, scale_bytes)


def encode_fp8_blocks(weight: jax.Array, block: int = 32) -> tuple[jax.Array, jax.Array]:
    """weight [out, in] -> (codes uint8 [out, in], E8M0 scales uint8 [ceil(out/b), ceil(in/b)]).

    The checkpoint's format of dense weights: E4M3, one scale per `block` x `block` square.
    """
    out, width = weight.shape
    tiles = _tiles(jnp.pad(weight, ((0, -out % block), (0, -width % block))), block)
    codes, scales = encode_e4m3(tiles, block * block)
    return _untiled(codes, block)[:out, :width], scales[..., 0]


def decode_fp8_blocks(
    codes: jax.Array, scales: jax.Array, dtype: DTypeLike = jnp.float32, block: int = 32
) -> jax.Array:
    """Weight [out, in] of `encode_fp8_blocks`'s bytes."""
    out, width = codes.shape
    tiles = _tiles(jnp.pad(codes, ((0, -out % block), (0, -width % block))), block)
    return _untiled(decode_e4m3(tiles, scales[..., None], dtype), block)[:out, :width]


def _tiles(x: jax.Array, block: int) -> jax.Array:
    """[out, in] -> [out / block, in / block, block * block]."""
    rows, columns = x.shape[0] // block, x.shape[1] // block
    tiles = x.reshape(rows, block, columns, block).swapaxes(1, 2)
    return tiles.reshape(rows, columns, block * block)


def _untiled(tiles: jax.Array, block: int) -> jax.Array:
    """[rows, columns, block * block] -> [rows * block, columns * block]."""
    rows, columns, _ = tiles.shape
    x = tiles.reshape(rows, columns, block, block).swapaxes(1, 2)
    return x.reshape(rows * block, columns * block)
