"""The command line: what a user may get wrong, and what they then read."""

import io
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from absl import flags

from deepinfer_jax.report import records
from experiments import harness, runtime, settings, workdir
from experiments.progress import Progress, progress

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = '''
"""An example. A second sentence."""

from ml_collections import config_dict


def get_config(arg=""):
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    config = config_dict.ConfigDict()
    config.name = "example"
    config.cluster = config_dict.ConfigDict({"engines": 8, "block_tokens": 128, "ratio": 0.5})
    config.requests = 10 if arg else 1000
    config.provenance = (("cluster.*", "released", "DeepInfer"), ("name", "assumed", ""))
    return config
'''
MAIN = '''
"""An experiment for a test."""
from absl import flags
from experiments import harness
import numpy as np

KIND = flags.DEFINE_string("kind", "", "What to do.")

def main(run):
    if KIND.value == "user":
        raise ValueError(
            f"engines {run.config.cluster.engines} is odd:\\n use an even number")
    if KIND.value == "numpy":
        np.zeros(3) + np.zeros(4)
    print("done", run.config.requests, run.seed, run.resuming)

if __name__ == "__main__":
    harness.run(main, config="example.py", resumable=True)
'''


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "example.py").write_text(CONFIG)
    (tmp_path / "main.py").write_text(textwrap.dedent(MAIN))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed(*arguments, config="example.py"):
    values = flags.FlagValues()
    harness.parse(["x", *arguments], config, values)
    return values


def begin(*arguments, **options):
    return harness.begin("x", parsed(*arguments), **options)


def test_overrides_variants_and_seeds(home):
    run = begin("--config=example.py:smoke", "--config.cluster.engines=4", "--seed=7")
    assert run.config.cluster.engines == 4 and run.config.requests == 10 and run.seed == 7
    assert run.parameters["cluster"] == {"engines": 4, "block_tokens": 128, "ratio": 0.5}
    assert "provenance" not in run.parameters and run.workdir is None
    with pytest.raises((AttributeError, KeyError)):
        run.config.cluster.new = 1
    assert begin("--config.requests=5").config.requests == 5  # the default config
    assert begin("--config", "example.py:smoke").config.requests == 10


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--config.cluster.engine=4", "no key cluster.engine: the nearest is cluster.engines"),
        ("--config.block_token=4", "the nearest is cluster.block_tokens"),
        ("--config.zzz=4", "none is similar"),
        ("--config=exampel.py", "the nearest is example.py"),
        ("--config=example.py:large", "variant 'large' is unknown"),
        ("--config.cluster.engines=many", "invalid literal"),
        ("--sed=3", "Unknown command line flag 'sed'"),
        ("--seed=x", "seed"),
        ("extra", "unexpected extra"),
    ],
)
def test_mistakes_are_one_line_with_the_nearest_name(home, argument, message):
    with pytest.raises(settings.UserError, match=message) as caught:
        parsed(argument)
    assert "\n" not in str(caught.value)


def test_experiments_without_a_config_and_with_a_compulsory_one(home):
    with pytest.raises(settings.UserError, match="Unknown command line flag 'config'"):
        parsed("--config=example.py", config=None)
    with pytest.raises(settings.UserError, match="--config is missing"):
        parsed(config="")
    assert harness.begin("x", parsed(config=None)).parameters == {}


def test_provenance_follows_first_match_then_command_line(home):
    rows = {r["parameter"]: r["tag"] for r in begin("--config.cluster.engines=4").provenance}
    assert rows == {
        "name": "assumed",
        "cluster.engines": "command line",
        "cluster.block_tokens": "released",
        "cluster.ratio": "released",
        "requests": "untagged",
    }


@pytest.mark.parametrize(
    "rule, message",
    [(("name", "guessed", ""), "'guessed'"), (("cluster.engine", "assumed", ""), "fits no")],
)
def test_stale_provenance_is_refused(home, rule, message):
    config = settings.load("example.py").unlock()
    config.provenance = (rule,)
    with pytest.raises(settings.UserError, match=message):
        settings.provenance(config)


def test_the_workdir_holds_the_config_before_the_run(home):
    run = begin("--workdir=out/a", "--config.cluster.ratio=0.25")
    written = json.loads((run.workdir / "config.json").read_text())
    assert written["config"]["cluster"]["ratio"] == 0.25 and written["schema_version"] == 1
    assert written["config_file"] == "example.py"


def test_a_workdir_is_resumed_only_by_the_identical_run(home):
    begin("--workdir=out")
    with pytest.raises(settings.UserError, match="already holds this very run"):
        begin("--workdir=out")
    assert begin("--workdir=out", resumable=True).resuming
    with pytest.raises(settings.UserError, match="seed: there 0, here 1"):
        begin("--workdir=out", "--seed=1", resumable=True)
    with pytest.raises(settings.UserError, match=r"cluster\.engines: there 8, here 2"):
        begin("--workdir=out", "--config.cluster.engines=2", resumable=True)


def test_overwrite_removes_a_runs_files_and_nothing_else(home):
    begin("--workdir=out")
    for name in ("summary.json", "notes.txt"):
        (home / "out" / name).write_text("{}")
    run = begin("--workdir=out", "--overwrite", "--seed=1", resumable=True)
    assert not run.resuming
    assert sorted(p.name for p in run.workdir.iterdir()) == ["config.json", "notes.txt"]
    (home / "precious").mkdir()
    (home / "precious" / "thesis.tex").write_text("x")
    with pytest.raises(settings.UserError, match="has no config"):
        begin("--workdir=precious", "--overwrite")
    with pytest.raises(settings.UserError, match="is a file"):
        begin("--workdir=example.py")


def test_a_dry_run_touches_nothing_and_lists_every_key(home):
    run = begin("--workdir=out", "--dry_run")
    text = harness.describe(run)
    assert run.workdir is None and not (home / "out").exists()
    assert all(name in text for name in ("cluster.block_tokens", "released", "DeepInfer"))
    assert max(map(len, text.splitlines())) <= 100


def test_an_unwritable_workdir_fails_before_the_work(home, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "replace", full)
    with pytest.raises(records.WriteError, match="No space left"):
        begin("--workdir=out")


def raised_by(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it did not raise")


def test_only_our_own_raise_is_the_users_to_mend():
    ours = {"__name__": "deepinfer_jax.policy.x", "np": np}
    exec("def bad(): raise ValueError('two\\nlines')\ndef bug(): np.zeros(3) + np.zeros(4)", ours)
    theirs = {"__name__": "somepackage.x"}
    exec("def bad(): raise ValueError('x')", theirs)
    assert harness.is_user_error(raised_by(ours["bad"]))
    assert not harness.is_user_error(raised_by(ours["bug"]))
    assert not harness.is_user_error(raised_by(theirs["bad"]))
    assert not harness.is_user_error(raised_by(lambda: [][1]))
    assert harness.is_user_error(raised_by(pathlib.Path("/no/such/file").read_text))
    assert harness.is_user_error(records.WriteError("disk"))


def shell(home, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "main.py", *arguments]
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)


def test_exit_status_and_what_the_user_reads(home):
    fine = shell(home, "--config=example.py:smoke", "--workdir=out")
    assert (fine.returncode, fine.stdout) == (0, "done 10 0 False\n"), fine.stderr
    user = shell(home, "--kind=user", "--config.cluster.engines=3")
    assert user.returncode == 2
    assert user.stderr == "error: engines 3 is odd: use an even number\n"
    bug = shell(home, "--kind=numpy")
    assert bug.returncode == 1 and "Traceback" in bug.stderr
    shown = shell(home, "--help")
    assert shown.returncode == 0 and shown.stderr == ""
    for part in ("An experiment for a test.", "--kind", "--overwrite", "(default example.py)"):
        assert part in shown.stdout


def test_a_missing_file_is_named_in_one_line(capsys):
    with pytest.raises(SystemExit) as status:
        harness.fail(raised_by(pathlib.Path("no/such/trace.jsonl").read_text))
    assert status.value.code == 2
    assert capsys.readouterr().err == "error: no/such/trace.jsonl: No such file or directory\n"


def test_flags_of_the_experiment_belong_to_the_identity_of_a_run(tmp_path):
    content = {"experiment": "labs", "seed": 0, "config": {}, "flags": {"lab": 23}}
    workdir.open_workdir(tmp_path / "w", content, overwrite=False, resumable=True)
    with pytest.raises(settings.UserError, match=r"flags\.lab: there 23, here 24"):
        other = {**content, "flags": {"lab": 24}}
        workdir.open_workdir(tmp_path / "w", other, overwrite=False, resumable=True)


def test_xla_flags_are_appended_once_and_respect_the_users():
    assert runtime.xla_flags("") == runtime.OPTIONS
    assert runtime.xla_flags("--a=1") == f"--a=1 {runtime.OPTIONS}"
    assert runtime.xla_flags(runtime.OPTIONS) == runtime.OPTIONS
    theirs = "--xla_backend_extra_options=other=1"
    assert runtime.xla_flags(theirs) == theirs
    assert "xla_backend_extra_options" in os.environ["XLA_FLAGS"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_silent_unless_watched():
    quiet, watched = io.StringIO(), Terminal()
    for stream in (quiet, watched):
        with Progress(4, "points", stream=stream, every=0.0) as bar:
            for _ in range(4):
                bar.step()
    assert quiet.getvalue() == ""
    assert "points: 50 %, 2 of 4" in watched.getvalue()
    assert watched.getvalue().endswith("\r\x1b[K")
    assert Progress(4, "points", stream=quiet).line(1.0).startswith("points: 0 %")
    assert list(progress([1, 2], "x")) == [1, 2]


def test_workdir_patterns_cover_what_the_report_writes():
    written = {"config.json", "summary.json", "results.jsonl", "report.html", "points.jsonl"}
    assert written <= set(workdir.OURS)
