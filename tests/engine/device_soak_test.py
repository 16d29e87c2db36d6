"""Long random traffic on the real device: nothing compiles, memory stays flat, nobody is lost.

The short tests run always; the long ones are 10,000 steps and 20,000 requests.
"""

import random
from collections import Counter

import jax
import pytest

from deepinfer_jax.engine.device import Device
from tests.engine.traffic import Traffic, group, memory, ranks

MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def devices(device: Device) -> list[Device]:
    """Three ranks, every program of them compiled."""
    made = ranks(device, 3)
    device.warm_up(masks=True)
    warm = Traffic(group(made), random.Random(0))
    for _ in range(30):
        warm.arrive()
    warm.finish()
    return made


class Compilations:
    """What the compiler and the tracer say they did, while it is open."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.open = True
        jax.monitoring.register_event_duration_secs_listener(self.hear)

    def hear(self, name: str, _seconds: float, **_: object) -> None:
        if self.open and ("compile" in name or "trace" in name):
            self.events.append(name)


def steps(device: Device, count: int, marks: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """So many steps of traffic that never dries up; `memory` at the marks."""
    traffic, found = Traffic(group([device]), random.Random(6)), []
    heard = Compilations()
    for step in range(1, count + 1):
        while len(traffic.live) < 7:
            traffic.arrive(longest=40, answer=30)
        if traffic.rng.random() < 0.02:
            traffic.disturb()
        traffic.call()
        if step in marks:
            found.append(memory())
    traffic.finish()
    heard.open = False
    assert not heard.events
    return found


def soak(devices: list[Device], total: int, episode: int, seed: int) -> Counter[str]:
    """Serve `total` requests in episodes, each with engines of another kind, ranks and pool."""
    rng, ends = random.Random(seed), Counter[str]()
    for first in range(0, total, episode):
        overlap, stop = rng.random() < 0.7, rng.random() < 0.3
        blocks, count = rng.choice([10, 12, 40]), rng.choice([1, 2, 3])
        engines = group(devices[:count], overlap=overlap, stop_preempted=stop, num_blocks=blocks)
        traffic = Traffic(engines, rng, first)
        for _ in range(episode):
            traffic.arrive(longest=40, answer=20 if rng.random() < 0.2 else 6)
            while len(traffic.live) > 5 * count and rng.random() < 0.9:
                traffic.call()
            if traffic.live and rng.random() < 0.05:
                traffic.disturb()
        traffic.finish()
        ends += traffic.ends
    assert sum(ends.values()) - ends["recomputed"] == total
    return ends


def test_some_hundred_steps_compile_nothing_and_keep_no_array(devices: list[Device]) -> None:
    early, late = steps(devices[0], 300, (100, 300))
    assert late[1:] == early[1:]


def test_two_hundred_requests_with_faults(devices: list[Device]) -> None:
    ends = soak(devices, 200, episode=25, seed=1)
    assert {"stop", "length", "abort", "grammar_error", "invalid"} <= set(ends)


@pytest.mark.slow
def test_ten_thousand_steps_compile_nothing_and_leave_memory_flat(devices: list[Device]) -> None:
    early, late = steps(devices[0], 10_000, (1_000, 10_000))
    print(f"after 1,000 and 10,000 steps: {early}, {late}")
    assert late[1:] == early[1:]
    assert late[0] - early[0] < 16 * MEBIBYTE


@pytest.mark.slow
def test_twenty_thousand_requests_with_faults(devices: list[Device]) -> None:
    ends = soak(devices, 20_000, episode=250, seed=2)
    print(ends)
    faults = ("abort", "grammar_error", "invalid", "insufficient_system_resource", "recomputed")
    assert all(ends[reason] > 20 for reason in faults), ends
