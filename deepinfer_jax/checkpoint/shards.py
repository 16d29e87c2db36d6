"""Safetensors files: headers without payload, bounds-checked ranges of rows, and a writer.

A file is an 8-byte little-endian length, a JSON header of that many bytes with the dtype, shape
and byte range of each tensor, and the bytes. Plain reads, no memory map.
Source: the format's description, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer_jax.checkpoint.names import ITEM_BYTES, Tensor

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
DTYPES: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I8": np.uint8,
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a tensor lies: absolute bytes [begin, end) of `file`."""

    tensor: Tensor
    file: Path
    begin: int
    end: int


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ValueError: no such file, or it does not hold one object.
    """
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); a checkpoint needs it"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; it must hold one object")
    return value


def read_header(file: Path) -> dict[str, Entry]:
    """Every tensor of a file by name; the byte ranges are inside the file and fit the shapes.

    Raises:
      ValueError: the file is absent, cut short, or not of this format.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ValueError(f"{file.name} is cut short or no safetensors file")
            header = json.loads(stream.read(length))
        entries = {
            name: _entry(file, name, value, 8 + length)
            for name, value in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise ValueError(f"{file.name} cannot be read ({error.strerror})") from None
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file.name} has a malformed header ({error!r})") from None
    return entries


def _entry(file: Path, name: str, value: dict[str, Any], base: int) -> Entry:
    begin, end = map(int, value["data_offsets"])
    tensor = Tensor(name, str(value["dtype"]), tuple(map(int, value["shape"])))
    return Entry(tensor, file, base + begin, base + end)


def problem(entry: Entry, expected: Tensor) -> str | None:
    """What is wrong with a tensor as its header describes it, or None."""
    found = entry.tensor
    if found.dtype != expected.dtype:
        return f"{found.name} is {found.dtype}, expected {expected.dtype}"
    if found.shape != expected.shape:
        return f"{found.name} has shape {list(found.shape)}, expected {list(expected.shape)}"
    if entry.end - entry.begin != expected.bytes:
        held = entry.end - entry.begin
        return f"{found.name} has {held} bytes in {entry.file.name}, expected {expected.bytes}"
    if entry.begin < 8 or entry.end > entry.file.stat().st_size:
        return f"{found.name} lies outside {entry.file.name}, which is cut short"
    return None


def read_rows(entry: Entry, first: int, count: int) -> np.ndarray:
    """Rows [first, first + count) along the first axis; 8-bit elements come as uint8.

    Raises:
      ValueError: the rows are outside the tensor, or the file has shrunk.
    """
    rows, *rest = entry.tensor.shape
    if not 0 <= first <= first + count <= rows:
        raise ValueError(f"{entry.tensor.name} has {rows} rows, not [{first}, {first + count})")
    dtype = DTYPES[entry.tensor.dtype]
    width = math.prod(rest)
    offset = entry.begin + first * width * ITEM_BYTES[entry.tensor.dtype]
    data = np.fromfile(entry.file, dtype, count * width, offset=offset)
    if data.size != count * width:
        raise ValueError(f"{entry.file.name} ended inside {entry.tensor.name}; it has changed")
    return data.reshape(count, *rest)


def write_shard(file: Path, tensors: list[Tensor], data: Iterable[np.ndarray]) -> None:
    """Write one file, taking the arrays one at a time in the order of `tensors`."""
    header: dict[str, Any] = {}
    at = 0
    for tensor in tensors:
        offsets = [at, at + tensor.bytes]
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": offsets,
        }
        at += tensor.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor, array in zip(tensors, data, strict=True):
            assert array.shape == tensor.shape and array.nbytes == tensor.bytes, tensor.name
            stream.write(np.ascontiguousarray(array).view(np.uint8).data)
        stream.flush()
        os.fsync(stream.fileno())
