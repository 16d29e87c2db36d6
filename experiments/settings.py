"""Config files: loading, the names they know, plain values, and where each value comes from."""

from __future__ import annotations

import ast
import difflib
import fnmatch
import importlib.util
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import config_dict

from deepinfer_jax.report import records

TAGS = ("released", "separate", "documented", "inferred", "assumed")
CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"


class UserError(ValueError):
    """Something to correct on the command line or in a config: shown as one line, no traceback."""


def nearest(word: str, known: Sequence[str]) -> str:
    """The known name most like `word`, by the whole name or by its last part; "" if none is."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not close:
        tail = word.rsplit(".", 1)[-1]
        tails = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
        close = [tails[t] for t in difflib.get_close_matches(tail, list(tails), n=1, cutoff=0.6)]
    return close[0] if close else ""


def load(path: str) -> config_dict.ConfigDict:
    """`get_config(variant)` of "file.py[:variant]", locked.

    Raises:
      UserError: no such file or variant, or it returns something else than a ConfigDict.
    """
    name, _, variant = path.partition(":")
    file = pathlib.Path(name)
    if not file.is_file():
        known = sorted(str(p) for p in file.parent.glob("*.py")) or [
            f"configs/{p.name}" for p in sorted(CONFIGS.glob("*.py"))
        ]
        guess = nearest(name, known)
        hint = f"; the nearest is {guess}" if guess else f"; known are {', '.join(known)}"
        raise UserError(f"--config={name} is not a file{hint}")
    spec = importlib.util.spec_from_file_location("config", file)
    if spec is None or spec.loader is None:
        raise UserError(f"--config={name} is not Python: give a .py file with get_config(arg)")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        config = module.get_config(*([variant] if variant else []))
    except ValueError as error:
        raise UserError(f"--config={path}: {error}") from error
    if not isinstance(config, config_dict.ConfigDict):
        raise UserError(f"{name}: get_config returned {type(config).__name__}, not a ConfigDict")
    return config.lock()


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every setting, in order; `provenance` is not a setting."""
    for name, value in config.items():
        if not prefix and name == "provenance":
            continue
        if isinstance(value, (Mapping, config_dict.ConfigDict)) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def refuse_unknown(argv: Sequence[str], config: config_dict.ConfigDict) -> None:
    """Checks each --config.name=value of `argv` against the config's own names.

    Raises:
      UserError: naming the nearest known key.
    """
    known = [name for name, _ in leaves(config)]
    branches = {name[:i] for name in known for i, c in enumerate(name) if c == "."}
    for argument in argv[1:]:
        match = re.match(r"--?(?:no)?config\.([^=\[]+)", argument)
        if match and match[1] not in branches and match[1] not in known:
            guess = nearest(match[1], known)
            hint = f"the nearest is {guess}" if guess else "none is similar"
            raise UserError(
                f"the config has no key {match[1]}: {hint}; --dry_run prints all of them"
            )


def resolve_config(config: config_dict.ConfigDict) -> dict[str, Any]:
    """The config as nested dicts of plain JSON values, references resolved, no `provenance`."""
    values = config.copy_and_resolve_references().to_dict()
    values.pop("provenance", None)
    return records.plain(values)


def provenance(
    config: config_dict.ConfigDict, overrides: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """[{parameter, value, tag, source}] for every setting of the config.

    A config may hold `provenance`, a tuple of (pattern, tag, source): the first pattern
    (`fnmatch`, "cost.*") that fits a setting tags it with one of `TAGS`. Settings given on the
    command line are tagged so, the remaining ones "untagged".

    Raises:
      UserError: an unknown tag, or a pattern that fits no setting.
    """
    rules = [tuple(rule) for rule in config.get("provenance", ())]
    settings = list(leaves(config))
    for pattern, tag, _ in rules:
        if tag not in TAGS:
            raise UserError(f"provenance tag {tag!r} of {pattern} is not one of {', '.join(TAGS)}")
        if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in settings):
            guess = nearest(pattern, [name for name, _ in settings])
            raise UserError(f"provenance pattern {pattern} fits no setting; nearest is {guess}")
    rows = []
    for name, value in settings:
        tag, source = next(
            ((t, s) for pattern, t, s in rules if fnmatch.fnmatchcase(name, pattern)),
            ("untagged", ""),
        )
        if any(name == o or name.startswith(f"{o}.") for o in overrides):
            tag, source = "command line", ""
        value = records.plain(value)
        rows.append({"parameter": name, "value": value, "tag": tag, "source": source})
    return rows


def catalogue() -> list[tuple[str, str]]:
    """(path, first line of its docstring) of every config shipped in configs/."""
    found = []
    for path in sorted(CONFIGS.glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        found.append((f"configs/{path.name}", text.partition("\n")[0]))
    return found
