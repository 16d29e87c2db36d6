"""Does a released checkpoint hold exactly the model? Answered from headers, before any payload.

Source: the released DeepInfer 0.1.0's loading rules (index, optional `model.` prefix, coverage).
"""

from __future__ import annotations

from pathlib import Path

from deepinfer_jax.checkpoint.names import Tensor, Weight
from deepinfer_jax.checkpoint.shards import INDEX, Entry, problem, read_header, read_json

_PREFIX = "model."
_SHOWN = 10


def find(directory: Path, weights: list[Weight]) -> dict[str, Entry]:
    """Where every tensor of `weights` lies, by its name without prefix.

    Raises:
      ValueError: the index and its shards do not hold exactly these tensors, with these dtypes and
        shapes, in whole files; one error names the first ten faults and counts them all.
    """
    expected = [t for weight in weights for part in weight.parts for t in part.tensors]
    places, problems = _places(directory)
    headers, faults = _headers(directory, set(places.values()))
    problems += faults
    problems += _prefix_problems(places)
    entries = {}
    for tensor in expected:
        entry, fault = _locate(tensor, places, headers)
        if entry:
            entries[tensor.name] = entry
        if fault:
            problems.append(fault)
    problems += _unexpected({t.name for t in expected}, places, headers)
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(
            f"{directory} does not hold this model, {len(problems)} faults: "
            f"{'; '.join(problems[:_SHOWN])}{more}. Check config.json, or download again"
        )
    return entries


def _places(directory: Path) -> tuple[dict[str, str], list[str]]:
    """The index: file name by tensor name, without those that point out of the directory."""
    places = read_json(directory / INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{directory / INDEX} has no weight_map; download it again")
    odd = [n for n, file in places.items() if not isinstance(file, str) or Path(file).name != file]
    problems = [f"{name} is indexed in {places[name]!r}, which is no file name" for name in odd]
    return {name: file for name, file in places.items() if name not in set(odd)}, problems


def _headers(
    directory: Path, files: set[str]
) -> tuple[dict[str, dict[str, Entry] | None], list[str]]:
    """Headers by file name, None for a file that cannot be used, and why."""
    headers: dict[str, dict[str, Entry] | None] = {}
    problems = []
    for file in sorted(files):
        try:
            headers[file] = read_header(directory / file)
        except ValueError as error:
            headers[file] = None
            problems.append(str(error))
    return headers, problems


def _prefix_problems(places: dict[str, str]) -> list[str]:
    """All names have the prefix, or none."""
    prefixed = [name for name in places if name.startswith(_PREFIX)]
    plain = [name for name in places if not name.startswith(_PREFIX)]
    odd = min(prefixed, plain, key=len)
    form = "with" if odd is prefixed else "without"
    return [f"{name} is {form} the prefix {_PREFIX!r}, unlike the others" for name in odd]


def _locate(
    tensor: Tensor, places: dict[str, str], headers: dict[str, dict[str, Entry] | None]
) -> tuple[Entry | None, str | None]:
    """(entry, None), or (None, what is wrong); a fault of the whole file is told elsewhere."""
    name = tensor.name if tensor.name in places else _PREFIX + tensor.name
    if name not in places:
        return None, f"{tensor.name} is missing"
    header = headers[places[name]]
    if header is None:
        return None, f"{tensor.name} is in the unusable {places[name]}"
    if name not in header:
        return None, f"{name} is not in {places[name]}, where the index has it"
    return header[name], problem(header[name], tensor)


def _unexpected(
    known: set[str], places: dict[str, str], headers: dict[str, dict[str, Entry] | None]
) -> list[str]:
    """Names that the model does not have, in the index or in a shard."""
    held = {name: file for file, header in headers.items() for name in header or ()}
    names = [n for n in {**held, **places} if n.removeprefix(_PREFIX) not in known]
    stray = [
        f"{name} is in {file} as well as in {places[name]}"
        for file, header in headers.items()
        for name in header or ()
        if places.get(name, file) != file
    ]
    return [f"{name} is unexpected" for name in names] + stray
