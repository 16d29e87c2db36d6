"""The vision stage: event for event an independent model's, a queueing formula, its refusals."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.simulator.encoders import EncoderConfig, behind_encoders, encode
from deepinfer_jax.simulator.traces import Trace, offsets

G, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def trace(arrivals: list[int], images: list[list[int]]) -> Trace:
    """Requests at `arrivals` ticks with images of so many tokens."""
    count = len(arrivals)
    tokens = np.array([sum(own) + 5 for own in images], np.int64)
    nothing = np.zeros(0, np.int64)
    return Trace(
        source="test",
        arrival=np.array(arrivals, np.int64),
        input_tokens=tokens,
        output_tokens=np.ones(count, np.int64),
        row=np.arange(count),
        block_tokens=0,
        run_first=nothing,
        run_count=nothing,
        run_offsets=np.zeros(count + 1, np.int64),
        image_tokens=np.array([i for own in images for i in own], np.int64),
        image_offsets=offsets([len(own) for own in images]),
    )


def draw(seed: int, number: int) -> int:
    """31 bits of splitmix64's output `number`, in plain ints."""
    z = (seed + G * (number + 1)) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) >> 33


def simulated(given: Trace, config: EncoderConfig) -> tuple[list[int], list[tuple[int, ...]]]:
    """(when each request is ready, (start, finish, GPU) of each image), by lists that are searched."""
    queue: list[tuple[int, int, int]] = []  # (GPU, finish, patches) of every image so far
    made, ready = [], []
    for q, arrival in enumerate(given.arrival.tolist()):
        last = arrival
        for image in range(given.image_offsets[q], given.image_offsets[q + 1]):
            patches = int(given.image_tokens[image]) * config.token_patches
            machine = draw(config.seed, image) % config.machines
            gpus = range(machine * config.gpus, (machine + 1) * config.gpus)
            waiting = {g: [(f, p) for h, f, p in queue if h == g and f > arrival] for g in gpus}
            gpu = min(gpus, key=lambda g: (sum(p for _, p in waiting[g]), g))
            start = max([arrival, *(finish for finish, _ in waiting[gpu])])
            work = patches * config.patch_femtoseconds + patches**2 * config.square_femtoseconds
            finish = start + config.image_ticks + (work + 999_999) // 1_000_000
            queue.append((gpu, finish, patches))
            made.append((start, finish, gpu))
            last = max(last, finish + config.transfer_ticks)
        ready.append(last)
    return ready, made


@settings(deadline=None, max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 40), st.lists(st.integers(1, 9), max_size=3)),
        min_size=1,
        max_size=25,
    ).filter(lambda rows: any(images for _, images in rows)),
    machines=st.integers(1, 2),
    gpus=st.integers(1, 2),
    times=st.tuples(*[st.integers(0, 9)] * 2, st.integers(0, 500), st.integers(0, 9)),
    seed=st.integers(0, 2**63),
)
def test_every_image_as_in_the_independent_model(
    requests: list, machines: int, gpus: int, times: tuple[int, ...], seed: int
) -> None:
    """Starts, ends and GPUs to the tick; ties in time and load happen often."""
    arrivals = np.cumsum([gap for gap, _ in requests]).tolist()
    given = trace(arrivals, [images for _, images in requests])
    image, patch, square, transfer = times
    config = EncoderConfig(
        machines=machines,
        gpus=gpus,
        image_ticks=image,
        patch_femtoseconds=patch * 100_000,
        square_femtoseconds=square,
        token_patches=3,
        transfer_ticks=transfer,
        seed=seed,
    )
    found = encode(given, config)
    ready, made = simulated(given, config)
    assert found.ready.tolist() == ready
    assert list(zip(found.start, found.finish, found.gpu, strict=True)) == made
    busy = [sum(f - s for s, f, g in made if g == gpu) for gpu in range(machines * gpus)]
    assert found.busy.tolist() == busy


def test_one_gpu_is_an_m_d_1_queue() -> None:
    """Poisson arrivals, equal images: the mean wait is rho / (2 (1 - rho)) services."""
    rng, count, service = np.random.default_rng(3), 200_000, 1_000_000
    load = 0.7
    arrivals = np.cumsum(rng.exponential(service / load, count)).astype(np.int64)
    given = trace(arrivals.tolist(), [[4]] * count)
    found = encode(
        given, EncoderConfig(machines=1, gpus=1, image_ticks=service, patch_femtoseconds=0)
    )
    wait = (found.start - arrivals).mean() / service
    assert wait == pytest.approx(load / (2 * (1 - load)), rel=0.03)


def test_requests_reach_the_service_when_their_images_are_encoded() -> None:
    """The second request has no image and overtakes the first."""
    given = trace([0, 10], [[3, 3], []])
    config = EncoderConfig(machines=1, gpus=1, image_ticks=100, patch_femtoseconds=0)
    found = behind_encoders(given, encode(given, config))
    assert found.arrival.tolist() == [10, 200]
    assert found.row.tolist() == [1, 0]
    assert found.input_tokens.tolist() == [5, 11]


def test_refusals() -> None:
    good = EncoderConfig(machines=1, gpus=1, image_ticks=1, patch_femtoseconds=0)
    with pytest.raises(ValueError, match="has no images, but the service has encoders"):
        encode(trace([0], [[]]), good)
    with pytest.raises(ValueError, match=r"encoders\.gpus is 0; give at least 1"):
        dataclasses.replace(good, gpus=0)
    with pytest.raises(ValueError, match=r"encoders\.transfer_ticks is -1; give 0 or more"):
        dataclasses.replace(good, transfer_ticks=-1)
