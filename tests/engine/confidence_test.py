"""Confidence-scheduled verification in the engine: worked lengths, the same tokens, fewer rows."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from deepinfer_jax.config import CacheConfig, EngineConfig
from deepinfer_jax.engine import measure
from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.device_state import reach
from deepinfer_jax.engine.draft_lengths import Chooser, cumulative, fill, split, total_rows
from deepinfer_jax.engine.loops import Engine
from deepinfer_jax.engine.plan import RowOutcome, StepPlan
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.sampling_params import SamplingParams
from deepinfer_jax.engine.scheduler import Scheduler
from deepinfer_jax.engine.step_curve import StepCurve
from tests.engine.scripted import Loop
from tests.engine.small_engine import BUCKETS, config, engine, prompts, requests, serve

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
CONFIG = config(verification="confidence")
CURVE = StepCurve((1, 2, 4, 8, 16, 24), (10, 10.2, 10.6, 11.5, 13.5, 16))
CONFIDENCES = {1: (0.9, 0.8, 0.7, 0.6, 0.5), 2: (0.6, 0.5, 0.4, 0.3, 0.2)}


def released(rates, pending):  # type: ignore[no-untyped-def]
    """The released engine's choice, whose steps take time by their rows alone."""
    known = fill(rates, pending, 5)
    total, _ = total_rows(known, CURVE.times(len(rates), 6 * len(rates)))
    return total - len(rates), 6


@pytest.mark.parametrize("overlap", [True, False])
def test_worked_lengths_step_by_step(overlap: bool) -> None:
    """Two requests: (1, 1) behind a prompt without drafts, then (6, 6), then (5, 3), in both loops.

    Source: the released DeepInfer 0.1.0, as driven by a fake device.
    """
    settings = EngineConfig(
        cache=CacheConfig(nextn=5), max_num_seqs=2, verification="confidence", overlap=overlap
    )
    scheduler = Scheduler(settings, 100, lengths=released)
    newest: dict[int, np.ndarray] = {}
    found: list[list[int]] = []

    def device(plan: StepPlan, i: int) -> RowOutcome:
        if plan.is_prompt:
            return RowOutcome((7,))
        known = [newest.get(row.request_id, np.zeros(5, np.float32)) for row in plan.rows]
        q = split(np.stack(known), plan.drafts, np.ones(len(known), bool)).tolist()
        if i == len(plan.rows) - 1:
            found.append(q)
            for row in plan.rows:
                newest[row.request_id] = cumulative(
                    np.array([CONFIDENCES[row.request_id]], np.float32)
                )[0]
        number = plan.rows[i].request_id
        return RowOutcome((7,), (1,) * 5, CONFIDENCES[number], q=q[i])

    for number in (1, 2):
        scheduler.add(Request(number, [5] * 10, max_tokens=6))
    Loop(scheduler, device).run()
    assert found[:4] == [[1, 1], [6, 6], [5, 3], [5, 3]]


@pytest.fixture(scope="module")
def confident(device: Device) -> Device:
    """The micro model again, one row or four; what is the same program is compiled already."""
    sizes = dataclasses.replace(BUCKETS, widths=(1, 4))
    made = Device(device.params, device.model, CONFIG, buckets=sizes)
    made.programs, made.compiled = device.programs, device.compiled
    made.warm_up()
    return made


def chosen(device: Device, curve: tuple[float, float], **changes: object) -> Engine:
    """An engine whose steps of one row and of four are said to take so long."""
    made = dataclasses.replace(CONFIG, **changes)
    lengths = Chooser({4: StepCurve((4, 16), curve)}, nextn=3)
    lengths.observe = lambda *_: None  # type: ignore[method-assign]  # this machine's own times
    scheduler = Scheduler(
        made, device.model.vocab_size, lookback=reach(device.model), lengths=lengths
    )
    return Engine(scheduler, device)


@pytest.mark.parametrize("overlap", [True, False])
def test_greedy_answers_do_not_depend_on_what_is_verified(
    device: Device, confident: Device, overlap: bool
) -> None:
    """Steps of one row only, of four only, and of both in turn; the device's split is the host's."""
    given = prompts(6, seed=61)
    want = serve(engine(device), requests(given, [GREEDY] * 6))
    seen = []
    for curve in ((1.0, 1.9), (1.0, 100.0), (1.0, 1.0)):
        one = chosen(confident, curve, overlap=overlap)
        widths: list[tuple[int, int]] = []
        one.record = lambda step, widths=widths: widths.append((step.requests, step.rows))
        assert serve(one, requests(given, [GREEDY] * 6)) == want
        seen.append({rows / count for count, rows in widths if rows <= 4 * count})
    assert seen[1] >= {1.0} and max(seen[2]) > 1 and len(seen[0]) > 1


def test_the_device_splits_as_the_host_would(confident: Device) -> None:
    """Query rows of every step, from the confidences that the step before reported."""
    given, rows = prompts(3, seed=62), 0
    one = chosen(confident, (1.0, 1.5), overlap=False)
    asked = requests(given, [GREEDY] * 3)
    for request in asked:
        one.add(request)
    while one.unfinished:
        known = {r.request_id: r.rates for r in asked if r.has_proposals}
        plan = one.scheduler.plan()
        one.forward(plan)
        pending, _ = one.sample(plan)
        outcome, _ = pending.wait(one.requests(plan))
        if not plan.is_prompt and plan.rows:
            width = plan.rows[0].q - 1
            rates = [[*known.get(r.request_id, ()), 0, 0, 0][:width] for r in plan.rows]
            live = np.ones(len(plan.rows), bool)
            if width:
                want = split(np.array(rates, np.float32), plan.drafts, live).tolist()
                assert [o.q for o in outcome.rows] == want
            rows += sum(o.q for o in outcome.rows)
            assert plan.total_q == sum(o.q for o in outcome.rows)
        one.scheduler.commit(plan, outcome)
        one.scheduler.release(plan)
    assert rows > 0


def test_curves_are_measured_kept_and_measured_anew(
    confident: Device, tmp_path: pathlib.Path
) -> None:
    first = measure.chooser(confident, tmp_path)
    (file,) = tmp_path.iterdir()
    assert first.curves[4].sizes == (4, 16) and all(t > 0 for t in first.curves[4].milliseconds)
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "milliseconds": [1.0, 2.0]}))
    assert measure.chooser(confident, tmp_path).curves[4].milliseconds == (1.0, 2.0)
    file.write_text("{")
    assert measure.chooser(confident, tmp_path).curves[4].milliseconds != (1.0, 2.0)


def test_nothing_compiles_after_warm_up(confident: Device) -> None:
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, _, **__: events.append(name))
    wish = SamplingParams(temperature=1.0, max_tokens=12)
    serve(chosen(confident, (1.0, 1.7)), requests(prompts(5, seed=63), [wish] * 5))
    assert not [name for name in events if "compile" in name or "trace" in name]


def test_what_does_not_fit_together_is_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="where no drafts are verified"):
        config(nextn=0, verification="confidence")
    with pytest.raises(ValueError, match="choose one of fixed, confidence"):
        config(verification="maybe")
    with pytest.raises(ValueError, match="give lengths with 'confidence' only"):
        Scheduler(CONFIG, 100)
    with pytest.raises(ValueError, match="buckets of widths end at 2"):
        sizes = dataclasses.replace(BUCKETS, widths=(1, 2))
        Device(device.params, device.model, CONFIG, buckets=sizes)
