"""The scheduler under any order of arrivals, steps, aborts and hits; integrity after every move."""

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from deepinfer_jax.cache.allocator import BlockPool
from deepinfer_jax.config import CacheConfig, EngineConfig
from deepinfer_jax.engine.plan import RowOutcome, StepPlan
from deepinfer_jax.engine.request import Hit, Request
from deepinfer_jax.engine.scheduler import Scheduler
from tests.engine.scripted import Loop

BLOCK, NEXTN = 8, 3


class Prefixes:
    """Full blocks by the tokens up to their end; the oldest unused go first. Reserves one token."""

    pool: BlockPool

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, ...], int] = {}
        self.replay = False
        self.hits = 0

    def match(self, request: Request) -> Hit | None:
        found = []
        for end in range(BLOCK, request.length, BLOCK):
            if (block := self.blocks.get(tuple(request.tokens[:end]))) is None:
                break
            found.append(block)
        if not found:
            return None
        self.hits += 1
        length = len(found) * BLOCK
        start = length - BLOCK if self.replay else length
        return Hit(length, start, start, length, tuple(found))

    def publish(self, request: Request, count: int) -> None:
        for i in range(count):
            key = tuple(request.tokens[: (i + 1) * BLOCK])
            if key not in self.blocks:
                self.blocks[key] = request.blocks[i]
                self.pool.pin((request.blocks[i],))

    def reclaim(self, count: int) -> None:
        for key in sorted(self.blocks, key=len, reverse=True):
            if count and self.pool.references(self.blocks[key]) == 1:
                self.pool.free((self.blocks.pop(key),))
                count -= 1

    def held(self) -> Iterable[int]:
        return self.blocks.values()


class Machine(RuleBasedStateMachine):
    """One engine, either loop; hypothesis chooses traffic and acceptance."""

    @initialize(overlap=st.booleans(), stop=st.booleans(), blocks=st.sampled_from([12, 20]))
    def begin(self, overlap: bool, stop: bool, blocks: int) -> None:
        config = EngineConfig(
            cache=CacheConfig(block_tokens=BLOCK, nextn=NEXTN),
            max_model_len=48,
            max_num_seqs=3,
            max_num_batched_tokens=20,
            chunked_prefill=True,
            prefill_interval=2,
            prefill_any_interval=3,
            overlap=overlap,
            stop_preempted=stop,
            num_blocks=blocks,
        )
        self.source = Prefixes()
        self.scheduler = Scheduler(config, 10, source=self.source, lookback=2)
        self.source.pool = self.scheduler.roster.storage.blocks
        self.choices: list[int] = [0]
        self.loop = Loop(self.scheduler, self.outcome)
        self.requests: dict[int, Request] = {}

    def outcome(self, plan: StepPlan, i: int) -> RowOutcome:
        row = plan.rows[i]
        # No row is stored into a block that the cache holds, hence others may read.
        first = max(self.requests[row.request_id].proc, row.store_from) // BLOCK
        assert not set(row.blocks[first:]) & set(self.source.held())
        choice = self.choices[(plan.number + i) % len(self.choices)]
        count = 1 if plan.is_prompt else 1 + choice % row.q
        drafts = (1,) * NEXTN if choice % 5 else ()
        return RowOutcome(tuple((choice + j) % 10 for j in range(count)), drafts)

    @rule(
        length=st.integers(1, 40),
        token=st.integers(1, 2),
        most=st.integers(1, 30),
        stops=st.booleans(),
        checkpoint=st.integers(0, 40),
    )
    def arrive(self, length: int, token: int, most: int, stops: bool, checkpoint: int) -> None:
        number = len(self.requests)
        points = (checkpoint,) if 0 < checkpoint <= length else ()
        ids = frozenset({0}) if stops else frozenset()
        request = Request(
            number, [token] * length, max_tokens=most, stop_ids=ids, checkpoints=points
        )
        self.scheduler.add(request)
        self.requests[number] = request

    @rule(choices=st.lists(st.integers(0, 19), min_size=1, max_size=4), replay=st.booleans())
    def step(self, choices: list[int], replay: bool) -> None:
        self.choices, self.source.replay = choices, replay
        plan = self.loop.call()
        for row in plan.rows:
            request = self.requests[row.request_id]
            inside = any(row.start < c < row.k for c in request.checkpoints)
            assert not (plan.is_prompt and inside)

    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        if self.requests:
            output = self.scheduler.abort(pick % len(self.requests))
            self.loop.news += [output] if output else []

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.choices = [7, 3]
        self.loop.run()
        self.source.reclaim(10**6)
        storage = self.scheduler.roster.storage
        assert storage.blocks.used_count == storage.slots.used_count == 0
        ended = [n.request_id for n in self.loop.news if n.finish_reason]
        assert sorted(ended) == sorted(self.requests)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
