"""What every experiment shares: flags, config, working directory, errors.

An experiment is one screen; the logic is in libraries:

    \"\"\"Simulates one cluster under one workload and writes a report.

      python -m experiments.simulate --config=configs/w2_azure.py:smoke --workdir=runs/w2
    \"\"\"

    from absl import flags

    from experiments import harness  # before the first jax computation: it sets XLA_FLAGS

    TRACE = flags.DEFINE_string("trace", "", "A trace file to use instead of the config's.")


    def main(run: harness.Run) -> None:
        t, kept = simulate(run.config, seed=run.seed, trace=TRACE.value)  # run.config is locked
        summary = metrics.summarise(t, warmup_seconds=run.config.warmup_seconds)
        print(table.table(table.latency_rows(summary), title="Latency"))
        if run.workdir:
            write.write_run(run.workdir, run.config.name, t, summary, provenance=run.provenance)


    if __name__ == "__main__":
        harness.run(main, config="configs/w2_azure.py")

`config` is the default of --config; "" makes the flag compulsory, None leaves it out (then
`run.config` is empty). A config file defines `get_config(arg="")`, returns a ConfigDict, knows
the variant "smoke" (`--config=configs/x.py:smoke`, seconds on a CPU), refuses unknown variants
with a ValueError, and tags its values in `config.provenance` (`settings.provenance`).

A sweep passes `resumable=True`: in a workdir of the identical experiment, seed and config,
`run.resuming` is True; it skips the points that `records.read_jsonl(run.workdir / "points.jsonl")`
holds and adds each new one with `records.append_jsonl`.

A ValueError that our own code raises is the user's to mend: one line, exit status 2. Any other
exception is ours and keeps its traceback, exit status 1.
"""

from __future__ import annotations

import dataclasses
import dis
import pathlib
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import config_dict, config_flags

from deepinfer_jax.report import records
from deepinfer_jax.report.table import cell, table
from experiments import runtime  # noqa: F401 (sets XLA_FLAGS)
from experiments.progress import Progress, progress  # noqa: F401 (mains use harness.progress)
from experiments.settings import (
    UserError,
    catalogue,
    load,
    provenance,
    refuse_unknown,
    resolve_config,
)
from experiments.workdir import open_workdir

OURS = ("deepinfer_jax", "experiments", "pallas_kernels", "configs", "__main__", "config")
FLAGS_OF_THE_HARNESS = ("config", "workdir", "seed", "dry_run", "overwrite", "traceback")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a main is given."""

    experiment: str  # module name, "simulate"
    config: config_dict.ConfigDict  # locked, overrides applied
    parameters: dict[str, Any]  # the same as plain nested dicts (`resolve_config`)
    provenance: list[dict[str, Any]]  # [{parameter, value, tag, source}], for the report
    seed: int
    workdir: pathlib.Path | None  # exists and holds config.json; None: print only
    resuming: bool  # the workdir holds an unfinished run with this very config


def define(flag_values: flags.FlagValues, config: str | None, argv: Sequence[str]) -> None:
    """Defines the flags of all experiments, once per `flag_values`."""
    if "workdir" in flag_values:
        return
    if config is not None:
        config_flags.DEFINE_config_file(
            "config",
            config or None,
            "Config file and variant, path.py[:variant]; the variant smoke runs in seconds. "
            "Override a value with --config.section.name=value after it.",
            flag_values=flag_values,
            lock_config=True,
            sys_argv=list(argv),
        )
    options: dict[str, Any] = {"flag_values": flag_values}
    flags.DEFINE_string(
        "workdir",
        "",
        "Directory for config.json, summary.json, results.jsonl, plots and report.html. Refused "
        "if another run is in it. Without it, the result is only printed.",
        **options,
    )
    flags.DEFINE_integer(
        "seed", 0, "Seed of everything random; equal seeds, equal runs.", **options
    )
    flags.DEFINE_bool(
        "dry_run", False, "Print the resolved config and where each value comes from.", **options
    )
    flags.DEFINE_bool(
        "overwrite", False, "Replace the files of an earlier run in --workdir.", **options
    )
    flags.DEFINE_bool(
        "traceback", False, "Show the traceback of errors in the input as well.", **options
    )


def parse(
    argv: Sequence[str], config: str | None, flag_values: flags.FlagValues = flags.FLAGS
) -> None:
    """Reads the command line into `flag_values`.

    Raises:
      UserError: an unknown flag, key, file or variant, or a value of the wrong type.
    """
    if config is not None:
        path = _config_path(argv) or config
        if not path:
            known = ", ".join(name for name, _ in catalogue()) or "none in configs/"
            raise UserError(f"--config is missing: give one of {known}, or your own file")
        refuse_unknown(argv, load(path))
    try:
        define(flag_values, config, argv)
        rest = flag_values(list(argv))
    except flags.Error as error:
        raise UserError(" ".join(str(error).splitlines()[:1])) from error
    if len(rest) > 1:
        raise UserError(f"unexpected {' '.join(rest[1:])}: options are written --name=value")


def _config_path(argv: Sequence[str]) -> str:
    """The value of --config in `argv`, "" without one."""
    for i, argument in enumerate(argv[1:], start=1):
        match = re.fullmatch(r"--?config(?:=(.*))?", argument, re.DOTALL)
        if match:
            return match[1] if match[1] is not None else "".join(argv[i + 1 : i + 2])
    return ""


def begin(
    experiment: str, flag_values: flags.FlagValues = flags.FLAGS, *, resumable: bool = False
) -> Run:
    """The `Run` of parsed flags; opens the workdir unless this is a dry run.

    Raises:
      UserError, records.WriteError: see `open_workdir`.
    """
    config, overrides, file = config_dict.ConfigDict(), [], ""
    if "config" in flag_values:
        config = flag_values["config"].value
        overrides = list(config_flags.get_override_values(flag_values["config"]))
        file = config_flags.get_config_filename(flag_values["config"])
    parameters, rows = resolve_config(config), provenance(config, overrides)
    seed: int = flag_values["seed"].value  # type: ignore[assignment]
    workdir = flag_values["workdir"].value
    own = {f.name: f.value for f in flag_values.get_key_flags_for_module(sys.argv[0])}
    content = {
        **records.environment(devices=False),
        "experiment": experiment,
        "config_file": file,
        "seed": seed,
        "flags": own,
        "config": parameters,
        "provenance": rows,
    }
    path, resuming = None, False
    if workdir and not flag_values["dry_run"].value:
        path = pathlib.Path(workdir)
        overwrite = bool(flag_values["overwrite"].value)
        resuming = open_workdir(path, content, overwrite=overwrite, resumable=resumable)
    return Run(experiment, config, parameters, rows, seed, path, resuming)


def describe(run: Run) -> str:
    """What --dry_run prints."""
    rows = [{**row, "value": cell(row["value"])} for row in run.provenance]
    head = f"{run.experiment}, seed {run.seed}: nothing was run"
    return table(rows, title=head) if rows else f"{head}; it takes no config"


def run(
    main: Callable[[Run], Any], *, config: str | None = "", resumable: bool = False
) -> NoReturn:
    """Parses the command line, calls `main(Run)` and exits: 0 done, 2 user error, 1 our error."""
    experiment = pathlib.Path(sys.argv[0]).stem

    def parser(argv: Sequence[str]) -> list[str]:
        if any(re.fullmatch(r"--?h(elp(short|full)?)?", argument) for argument in argv[1:]):
            print(help_text(config))
            sys.exit(0)
        try:
            parse(argv, config)
        except UserError as error:
            fail(error)
        return [argv[0]]

    def guarded(_: Sequence[str]) -> None:
        try:
            this = begin(experiment, resumable=resumable)
            if flags.FLAGS.dry_run:
                print(describe(this))
            else:
                main(this)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)
        except Exception as error:
            if flags.FLAGS.traceback or not is_user_error(error):
                raise
            fail(error)

    app.run(guarded, flags_parser=parser)
    sys.exit(0)


def is_user_error(error: Exception) -> bool:
    """True for what a user can mend: our own `raise ValueError`, unwritable or unreadable files.

    A ValueError that numpy or jax raises under our code is a bug of ours, so what counts is the
    instruction of the innermost frame: a raise statement in a module of ours.
    """
    if isinstance(error, (UserError, records.WriteError)):
        return True
    if isinstance(error, (FileNotFoundError, IsADirectoryError, PermissionError)):
        return error.filename is not None
    trace = error.__traceback__
    if not isinstance(error, ValueError) or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    instruction = trace.tb_frame.f_code.co_code[trace.tb_lasti]
    return module in OURS and dis.opname[instruction] == "RAISE_VARARGS"


def fail(error: Exception) -> NoReturn:
    """Prints the error as one line and exits with status 2."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(2)


def help_text(config: str | None) -> str:
    """The main module's docstring, its flags, the shared ones, and the shipped configs."""
    values = flags.FLAGS
    define(values, None if config is None else "", sys.argv[:1])
    own = [flag.name for flag in values.get_key_flags_for_module(sys.argv[0])]
    shared = [name for name in FLAGS_OF_THE_HARNESS if name in values and name not in own]
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), ""]
    for name in (*own, *shared):
        flag = values[name]
        default = f" (default {flag.default})" if flag.default not in (None, "", False) else ""
        if name == "config" and config:
            default = f" (default {config})"
        note = " ".join(str(flag.help).split())
        lines.append(f"  --{name}{default}")
        lines.append(textwrap.indent(textwrap.fill(note, 90), " " * 6))
    found = catalogue() if config is not None else []
    if found:
        width = max(len(path) for path, _ in found)
        lines += ["", "Configs:"]
        lines += [f"  {path.ljust(width)}  {text}"[:100] for path, text in found]
    return "\n".join(lines)
