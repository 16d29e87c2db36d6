"""The simulator as a queue: M/M/c, M/D/c and a tandem against formulas and exact recursions."""

import heapq
import itertools
import json
import pathlib
import time

import numpy as np
import pytest
from scipy import stats

from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Mode
from deepinfer_jax.simulator.simulate import prepare, sweep
from deepinfer_jax.simulator.traces import plain
from deepinfer_jax.simulator.workload import workload
from tests.simulator import queues
from tests.simulator.queues import SERVICE, TOKEN, Row

RESULTS = pathlib.Path(__file__).parents[1] / "testdata" / "queueing_results.json"
QUICK = (Row(2, 0.5), Row(2, 0.8), Row(2, 0.9), Row(2, 0.8, "constant"))
JOBS, SEEDS = 30_000, 8
FULL_JOBS = 10**6
FULL_SEEDS = 16
TABLE = sorted([*queues.PUBLISHED, *queues.CONSTANT])


def test_formulas_against_published_numbers():
    for row, (waits, wait) in queues.PUBLISHED.items():
        assert queues.answer(row) == pytest.approx((waits, wait), rel=2e-7)
        beyond = queues.occupancy(row.servers, row.rho, 3999)[row.servers :].sum()
        assert beyond == pytest.approx(queues.answer(row)[0], rel=1e-9)
    assert queues.answer(Row(1, 0.8, "constant"))[1] == pytest.approx(2.0, rel=1e-9)
    # Cosmetatos' approximation of M/D/c, a few per cent off at most.
    for row in queues.CONSTANT:
        c, rho = row.servers, row.rho
        bend = (1 - rho) * (c - 1) * (np.sqrt(4 + 5 * c) - 2) / (16 * rho * c)
        near = queues.answer(Row(c, rho))[1] / 2 * (1 + bend)
        assert queues.answer(row)[1] == pytest.approx(near, rel=0.025)
        assert queues.answer(row)[1] == pytest.approx(queues.spitzer(c, rho), rel=1e-8)
    # Simulated elsewhere: 0.8927 with a standard error of 0.007, and two without.
    for row, simulated in zip(queues.CONSTANT[1:], (0.8927, 0.3808, 0.4412), strict=True):
        assert queues.answer(row)[1] == pytest.approx(simulated, rel=0.02)


@pytest.fixture(scope="module")
def quick():
    """Row -> workloads [seeds], start and finish [seeds, jobs], busy ticks [seeds, engines]."""
    loads = [[queues.jobs(row, JOBS, seed) for seed in range(SEEDS)] for row in QUICK]
    made = sweep(
        [queues.servers(2)] * (len(QUICK) * SEEDS),
        list(itertools.chain(*loads)),
        lambda run: (run.requests.prefill_start, run.requests.finish, run.busy.sum(axis=1)),
    )
    start, finish, busy = (x.reshape(len(QUICK), SEEDS, -1) for x in made)
    return {row: (loads[i], start[i], finish[i], busy[i]) for i, row in enumerate(QUICK)}


def test_every_start_is_the_recursion_of_a_queue(quick):
    for loads, starts, finishes, busy in quick.values():
        for load, start, finish, ticks in zip(loads, starts, finishes, busy, strict=True):
            service = load.input_tokens.astype(np.int64) * TOKEN
            expected = queues.first_come_first_served(load.arrival, service, 2)
            assert np.array_equal(start, expected)
            assert np.array_equal(finish, expected + service)
            assert ticks.sum() == service.sum()


def check(name, exact, values, level, precision):
    """The exact value lies in the interval, and the interval says something."""
    found = queues.interval(values, level)
    assert found.half < precision * exact, f"{name}: {found} tells little about {exact}"
    assert found.holds(exact), f"{name}: {exact} is outside {found}"


def test_waits_and_loads_agree_with_the_formulas(quick):
    level = 1 - 0.01 / (3 * len(QUICK))  # all intervals hold together in 99 of 100 experiments
    for row, (loads, starts, finishes, busy) in quick.items():
        waits_exactly, wait_exactly = queues.answer(row)
        arrivals = np.array([load.arrival for load in loads])
        wait = queues.steady(starts - arrivals) / SERVICE
        check(row.name, wait_exactly, wait.mean(axis=1), level, 0.2)
        check(row.name, waits_exactly, (wait > 0).mean(axis=1), level, 0.1)
        load = busy.sum(axis=1) / (row.servers * finishes.max(axis=1))
        check(row.name, row.rho, load, level, 0.03)


def seen(arrival, leave, at):
    """How many stand between `arrival` and `leave` just before each time `at`."""
    return np.searchsorted(arrival, at, "left") - np.searchsorted(np.sort(leave), at, "left")


def test_little_and_what_arrivals_see(quick):
    """L = lambda W, where L is what Poisson arrivals see, of the line and of the whole system."""
    row = Row(2, 0.8)
    loads, starts, finishes, _ = quick[row]
    law = queues.occupancy(2, 0.8, 3)
    rate = row.servers * row.rho
    gaps, shares = [], []
    for load, start, finish in zip(loads, starts, finishes, strict=True):
        arrival = np.asarray(load.arrival)
        at = queues.steady(arrival)
        for leave in (start, finish):
            length = seen(arrival, leave, at).mean()
            gaps.append(length - rate * queues.steady(leave - arrival).mean() / SERVICE)
        found = np.bincount(seen(arrival, finish, at), minlength=5)[:4]
        shares.append(found / len(at))
    level = 1 - 0.01 / 6
    for gap in (gaps[::2], gaps[1::2]):
        assert queues.interval(gap, level).holds(0)
        assert queues.interval(gap, level).half < 0.3
    for n in range(4):
        check(f"P(N={n})", law[n], [share[n] for share in shares], level, 0.15)


# A tandem: M/M/2 prompt engines, then one completion engine whose 3 slots are the servers. A decode
# step lasts STEP whatever its rows, and outputs of many steps make a service nearly continuous.
STEP = 10**5
MEAN_STEPS = 15_000
TANDEM_RATE = 1.5  # per second; services last 1 s and 1.5 s on average


def tandem_cluster():
    first = queues.servers(2)
    return ClusterConfig(
        modes=(Mode.PROMPT, Mode.PROMPT, Mode.COMPLETION),
        slots=3,
        cost=type(first.cost)(0, TOKEN * 10**6, 0, 0, 0, 0, ((STEP * 10**6, 0, 0),), 0, 0),
        tier_quota=(1,),
        batch_requests=1,
        chunk_multiple=FOREVER,
    )


def tandem_jobs(seed, count):
    dice = np.random.default_rng([seed, 77])
    arrival = np.cumsum(dice.exponential(SERVICE / TANDEM_RATE, count)).astype(np.int64)
    prompts = np.maximum(np.rint(dice.exponential(SERVICE / TOKEN, count)), 1)
    outputs = 1 + dice.geometric(1 / MEAN_STEPS, count)
    return workload(plain("tandem", arrival, prompts, outputs))


def slots_at_boundaries(came, steps, slots):
    """Start of every decode: requests join in order, a busy engine at its next boundary."""
    free, start, grid, last = [0] * slots, np.zeros_like(came), 0, -1
    for i in np.argsort(came, kind="stable"):
        ready = max(int(came[i]), free[0])
        if ready >= last:
            grid = ready
        start[i] = grid - (grid - ready) // STEP * STEP
        end = int(start[i] + steps[i] * STEP)
        heapq.heapreplace(free, end)
        last = max(last, end)
    return start


@pytest.fixture(scope="module")
def tandem():
    count, seeds = 15_000, 12
    loads = [tandem_jobs(seed, count) for seed in range(seeds)]
    prepared = prepare(tandem_cluster(), loads[0], options={"xla_backend_optimization_level": 0})
    return loads, [queues.again(prepared, load).requests for load in loads]


def test_tandem_follows_the_two_recursions(tandem):
    for load, run in zip(*tandem, strict=True):
        service = load.input_tokens.astype(np.int64) * TOKEN
        begin = queues.first_come_first_served(load.arrival, service, 2)
        assert np.array_equal(run.first_token, begin + service)
        steps = load.output_tokens.astype(np.int64) - 1
        decode = slots_at_boundaries(run.first_token, steps, 3)
        assert np.array_equal(run.decode_start, decode)
        assert np.array_equal(run.finish, decode + steps * STEP)


def test_tandem_has_product_form(tandem):
    """Burke: an M/M/c queue's departures are Poisson, so the second queue is M/M/c by itself."""
    level = 1 - 0.01 / 15
    first, second = queues.occupancy(2, 0.75, 2), queues.occupancy(3, 0.75, 2)
    joint, waits, gaps, both = [], [], [], []
    for load, run in zip(*tandem, strict=True):
        arrival = np.asarray(load.arrival)
        at = queues.steady(np.linspace(0, arrival[-1], 60_000).astype(np.int64))
        ahead = seen(arrival, run.first_token, at)
        behind = seen(np.sort(run.first_token), run.finish, at)
        joint.append([np.mean((ahead == i) & (behind == j)) for i in range(3) for j in range(3)])
        waits.append(queues.steady(run.decode_start - run.first_token).mean() / SERVICE)
        between = queues.steady(np.diff(np.sort(run.first_token)))
        gaps.append([between.std() / between.mean(), lag_correlation(between)])
        sojourns = (run.first_token - arrival, run.finish - run.first_token)
        one, two = (queues.steady(x) for x in sojourns)
        both.append(np.corrcoef(one, two)[0, 1])
    for k, (i, j) in enumerate(itertools.product(range(3), range(3))):
        check(f"P({i}, {j})", first[i] * second[j], [x[k] for x in joint], level, 0.3)
    # A request waits for the next boundary, half a step on average, if the engine is busy.
    exact = queues.answer(Row(3, 0.75))[1] * MEAN_STEPS * STEP / SERVICE
    check("decode wait", exact, waits, level, 0.2)
    check("departures' variation", 1, [g[0] for g in gaps], level, 0.05)
    for values in ([g[1] for g in gaps], both):
        found = queues.interval(values, level)
        assert found.holds(0) and found.half < 0.1


def lag_correlation(values):
    return np.corrcoef(values[1:], values[:-1])[0, 1]


def measure(row, prepared, count, seeds):
    """One row of the table: exact values and what `seeds` runs of `count` jobs found."""
    begin = time.perf_counter()
    waits, waited, loads = [], [], []
    for seed in range(seeds):
        load = queues.jobs(row, count, seed)
        run = queues.again(prepared, load)
        wait = queues.steady(run.requests.prefill_start - load.arrival) / SERVICE
        waits.append(wait.mean())
        waited.append((wait > 0).mean())
        loads.append(run.busy.sum() / (row.servers * run.requests.finish.max()))
    exact = dict(zip(("waiting", "wait"), queues.answer(row), strict=True)) | {"load": row.rho}
    found = {"waiting": waited, "wait": waits, "load": loads}
    return {
        "queue": row.name,
        "jobs": count,
        "seeds": seeds,
        "seconds": round(time.perf_counter() - begin, 1),
        "exact": {k: round(v, 10) for k, v in exact.items()},
        "found": {k: [round(x, 7) for x in queues.interval(v)] for k, v in found.items()},
    }


@pytest.mark.slow
def test_the_whole_table():
    """All rows at full size; writes testdata/queueing_results.json (20 minutes)."""
    table = []
    for count, group in itertools.groupby(TABLE, lambda row: row.servers):
        group = list(group)
        prepared = prepare(queues.servers(count), queues.jobs(group[0], FULL_JOBS, 0))
        for row in group:
            table.append(measure(row, prepared, FULL_JOBS, FULL_SEEDS))
            print(json.dumps(table[-1]), flush=True)
    about = {
        "interval": "[mean, half width of the 99 % Student t interval over seeds], in services",
        "warm_up": f"the first {queues.WARM_UP:.0%} of the jobs of a run have no say in its waits",
        "load": "busy time over the whole run, in which servers also fill and run empty",
    }
    RESULTS.write_text(json.dumps(about | {"rows": table}, indent=1) + "\n")
    test_the_committed_table()


def test_the_committed_table():
    """Every queue of the table is there and agrees with its exact answer.

    54 intervals of 99 % each: few may miss, and all hold when widened to 99 % for all of them.
    """
    rows = json.loads(RESULTS.read_text())["rows"]
    exact = {row.name: (*queues.answer(row), row.rho) for row in TABLE}
    assert [row["queue"] for row in rows] == list(exact)
    missed, wider = 0, stats.t.ppf([0.995, 1 - 0.005 / (3 * len(TABLE))], FULL_SEEDS - 1)
    for queue, row in zip(TABLE, rows, strict=True):
        assert row["seeds"] == FULL_SEEDS and row["jobs"] == FULL_JOBS
        for value, (name, (mean, half)) in zip(
            exact[row["queue"]], row["found"].items(), strict=True
        ):
            assert half < (0.04 if queue.servers <= 8 else 0.06) * value
            assert abs(mean - value) < wider[1] / wider[0] * half, f"{row['queue']}: {name}"
            missed += abs(mean - value) > half
    assert missed <= 3
