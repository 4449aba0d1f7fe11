"""Steps that are recorded are the same on all ranks, and what is left out keeps its time."""

import itertools
import random
import time

import msgspec
import pytest
import torch
import torch.distributed as dist

import aorta
from aorta.errors import InstrumentError
from aorta.record import sampling
from aorta.record.interception.switch import Interception
from aorta.record.overhead import BLOCK, NUM_FIRST, block_of
from aorta.record.sampling import Sampling
from aorta.records.reader import read_run, read_steps
from aorta.records.schema import StepRecord
from tests.limits import LIMIT_S
from tests.record.sampled import record_every


class FakeStore:
    """A store in this process; `delay` answers later than they were set."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def check(self, keys):
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key].encode()


class Loop:
    """A rank's loop on a clock of its own: recorded steps take cost_ms more."""

    def __init__(self, rank, world_size, store, cost_ms, limit=0.01, state=None):
        self.now_ns = 1
        self.cost_ms = cost_ms
        self.sampling = Sampling(limit, lambda: self.now_ns, lambda: self.now_ns)
        self.sampling.open(rank, world_size, lambda: store, state)
        self.recorded = []

    def step(self, number, plain_ms=10.0, cheaply=False):
        recorded = not (cheaply and self.sampling.goes_on(self.now_ns)) and self.sampling.begin(number)
        self.recorded.append(recorded)
        self.now_ns += int((plain_ms + self.cost_ms * recorded) * 1e6)


def settled(loops):
    """Let the threads that talk to the store have their turn."""
    for loop in loops:
        talk = loop.sampling._talk
        if talk is not None:
            talk._awake.set()
    time.sleep(0.0005)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(sampling, "ASK_EVERY_S", 0.001)


def shares(loop):
    later = loop.recorded[NUM_FIRST:]
    return sum(later) / len(later)


def test_a_loop_that_recording_costs_much_is_recorded_rarely_and_stays_within_the_limit():
    loop = Loop(0, 1, None, cost_ms=4.0)
    for number in range(30_000):
        loop.step(number)
    assert 0.2 * 0.01 / 0.4 < shares(loop) <= 0.01 / 0.4
    assert loop.sampling.record().later_cost <= 0.01


def test_a_loop_that_it_costs_nothing_is_recorded_nearly_always():
    loop = Loop(0, 1, None, cost_ms=0.0)
    for number in range(4000):
        loop.step(number)
    assert shares(loop) > 0.9


def test_loops_that_drift_stay_within_the_limit():
    """50 ms a step, that wander by 8 and stay there for some 20 steps; recording takes 5 of each. The first
    blocks may be off the steps beside them by more than that, either way."""
    num_later = []
    for seed in range(30):
        noise, loop, off_ms = random.Random(seed), Loop(0, 1, None, cost_ms=5.0), 0.0
        for number in range(250):
            off_ms = 0.95 * off_ms + noise.gauss(0, 2.5)
            loop.step(number, 50.0 + off_ms)
        num_later.append(sum(loop.recorded[NUM_FIRST:]))
    assert max(num_later) <= 3 * BLOCK
    assert sum(num_later) / len(num_later) * 5.0 <= 0.01 * 50.0 * (250 - NUM_FIRST)


def test_off_records_every_step():
    loop = Loop(0, 1, None, cost_ms=50.0, limit=None)
    for number in range(200):
        loop.step(number)
    assert all(loop.recorded)
    record = loop.sampling.record()
    assert (record.limit, record.cost, record.num_recorded) == (None, None, 200)


def test_ranks_record_the_same_steps_though_only_one_of_them_measures():
    store = FakeStore()
    loops = [Loop(rank, 3, store, cost_ms=0.4) for rank in range(3)]
    for number in range(6000):
        for loop in loops:
            loop.step(number)
        if number % 8 == 0:
            settled(loops)
    for loop in loops:
        loop.sampling.close()
        loop.sampling._talk._thread.join(LIMIT_S)
        assert not loop.sampling._talk._thread.is_alive()
    first, *others = (loop.recorded for loop in loops)
    assert 0.02 < shares(loops[0]) < 0.3
    for other in others:
        assert other == first


def test_a_rank_that_hears_nothing_records_steps_that_the_others_record_too():
    store, deaf = FakeStore(), FakeStore()
    loops = [Loop(0, 2, store, cost_ms=0.4), Loop(1, 2, deaf, cost_ms=0.4)]
    for number in range(6000):
        for loop in loops:
            loop.step(number)
        if number % 8 == 0:
            settled(loops)
    for loop in loops:
        loop.sampling.close()
    pairs = zip(loops[1].recorded, loops[0].recorded, strict=True)
    assert not any(mine and not theirs for mine, theirs in pairs)


@pytest.mark.parametrize("changed_ms", [13.0, 7.0])
@pytest.mark.parametrize("cheaply", [False, True])
def test_blocks_after_a_change_of_length_are_recorded_on_all_ranks(changed_ms, cheaply):
    """A quarter of the steps scatters. The ranks notice at places that differ, and share a block."""
    loops = [Loop(rank, 1, None, cost_ms=8.0) for rank in range(2)]
    scatter = random.Random(0)
    for number in range(9000):
        for loop in loops:
            plain_ms = changed_ms if number >= 7900 else 10.0
            loop.step(number, plain_ms + scatter.choice([0.0, 0.0, 0.0, 1.0]), cheaply)
    both = [number for number in range(9000) if all(loop.recorded[number] for loop in loops)]
    after = [n for n in both if 7900 <= n < 7980]
    assert len(after) >= BLOCK
    assert loops[0].sampling.record().later_cost <= 0.01


def test_a_loop_that_recording_makes_twice_as_long_has_not_changed():
    loop = Loop(0, 1, None, cost_ms=15.0)
    for number in range(30_000):
        loop.step(number)
    assert loop.sampling._extra == range(0)


def test_the_block_after_a_slow_step_is_recorded_within_the_limit():
    loop = Loop(0, 1, None, cost_ms=0.5)
    for number in range(8000):
        loop.step(number, plain_ms=60.0 if number == 7001 else 10.0)
    after = (block_of(7001) + 1) * BLOCK + NUM_FIRST
    assert all(loop.recorded[after : after + BLOCK])


@pytest.mark.parametrize(("cost_ms", "plain_ms"), [(0.05, 10.0), (0.45, 10.0), (0.5, 0.3), (4.0, 2.0)])
def test_steps_that_go_on_cheaply_are_judged_like_those_begun_in_full(cost_ms, plain_ms):
    """With slow steps and with pauses. A decision may come a quarter of a second later."""
    loops = [Loop(0, 1, None, cost_ms) for _ in range(2)]
    num_cheap = 0
    for number in range(12_000):
        for loop, cheaply in zip(loops, (False, True), strict=True):
            if number % 3000 == 1700:
                loop.sampling.interrupted()
            length_ms = 20 * plain_ms if number in (4001, 9005) else plain_ms + number % 7 * 0.01 * plain_ms
            loop.step(number, length_ms, cheaply)
        num_cheap += len(loops[1].sampling._plain) > 0
    in_full, cheap = (loop.sampling.record() for loop in loops)
    assert shares(loops[1]) == pytest.approx(shares(loops[0]), rel=0.05)
    assert cheap.num_steps == in_full.num_steps
    assert cheap.cost == pytest.approx(in_full.cost, rel=0.05)
    assert cheap.step_ms == pytest.approx(in_full.step_ms, rel=0.01) == pytest.approx(cost_ms, rel=0.1)
    assert num_cheap > 6000 or shares(loops[0]) > 0.2


def test_a_restart_goes_on_with_what_was_measured(tmp_path):
    state = tmp_path / ".overhead"
    before = Loop(0, 1, None, cost_ms=1.0, state=state)
    for number in range(3000):
        before.step(number)
    before.sampling.close()
    after = Loop(0, 1, None, cost_ms=1.0, state=state)
    after.step(0)
    assert after.sampling.meter.cost() == before.sampling.meter.cost()


def recorded_run(folder, num_steps, period, body=lambda: None, **options):
    """The records of a run of which one step of `period` is recorded, on this CPU alone."""
    records: list[StepRecord] = []
    with record_every(aorta.instrument(folder, **options), period) as recorder:
        recorder.on_record(records.append)
        for _ in range(num_steps):
            with recorder.step() as step:
                body()
                step.log(loss=1.0)
    return records


def test_a_step_that_is_left_out_has_its_times_and_what_was_logged_and_reasons_for_the_rest(tmp_path):
    records = recorded_run(tmp_path, 7, 3, lambda: time.sleep(0.002))
    assert [record.is_recorded for record in records] == [True, False, False] * 2 + [True]
    for record in records:
        assert min(record.step_ms, record.host_ms) >= 2.0
        assert record.loss == 1.0
        assert record.instrument_ms is not None
    for record in records:
        if not record.is_recorded:
            assert (record.collectives, record.overlap.compute_ms) == (None, None)
            assert record.not_measured["overlap"] == record.not_measured["collectives"]
            assert "overhead" in record.not_measured["overlap"]
    lines = list(read_steps(tmp_path / "rank_0_metrics.jsonl", []))
    assert [line.is_recorded for line in lines] == [record.is_recorded for record in records]
    starts = [line.start_unix_ns for line in lines]
    ends = [line.end_unix_ns for line in lines]
    for end, start in itertools.pairwise(zip(starts, ends, strict=True)):
        assert abs(start[0] - end[1]) < 200_000  # windows follow each other without a gap


def test_nothing_of_ours_is_replaced_in_a_step_that_is_left_out(tmp_path):
    """Operators, methods of process groups and futures are the program's own again, and no other recorder
    may take their place."""
    from torch._C._distributed_c10d import ProcessGroup

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain = ProcessGroup.__dict__["allreduce"]
        seen = []

        def body():
            dist.all_reduce(torch.ones(1))
            seen.append((ProcessGroup.__dict__["allreduce"] is plain, Interception._installed is not None))

        records = recorded_run(tmp_path, 4, 2, body)
        assert seen == [(False, True), (True, True)] * 2
        assert [record.collectives and len(record.collectives) for record in records] == [1, None, 1, None]
        # Collectives that were not seen have numbers all the same.
        assert [record.collectives[0].seq for record in records[::2]] == [0, 2]
        groups = read_run(tmp_path).coverage["groups"]
        assert groups == {"default": {"backend": 2, "seen": 2}}
    finally:
        dist.destroy_process_group()


def test_a_recorder_of_the_program_s_own_is_refused_while_one_rests(tmp_path):
    with record_every(aorta.instrument(tmp_path / "a"), 2) as recorder:
        for _ in range(2):
            with recorder.step():
                pass
        with pytest.raises(InstrumentError, match="instrumented already"), aorta.instrument(tmp_path / "b"):
            pass


def test_dedicated_placement_records_every_step(tmp_path):
    with aorta.instrument(tmp_path, placement="dedicated", overhead=0.0001) as recorder:
        for _ in range(NUM_FIRST + 20):
            with recorder.step():
                pass
    run = read_run(tmp_path)
    assert run.overhead.num_recorded == NUM_FIRST + 20
    assert run.overhead.limit is None


def test_the_overhead_of_a_run_is_in_its_run_json(tmp_path):
    with aorta.instrument(tmp_path, overhead="2%") as recorder:
        for _ in range(NUM_FIRST + 40):
            with recorder.step():
                time.sleep(0.005)
    overhead = read_run(tmp_path).overhead
    assert overhead.limit == 0.02
    assert overhead.num_first == NUM_FIRST
    assert overhead.num_recorded >= NUM_FIRST
    assert overhead.cost is not None
    assert overhead.interval[0] <= overhead.cost <= overhead.interval[1]
    assert msgspec.to_builtins(overhead)["step_ms"] is not None


@pytest.mark.parametrize(
    ("text", "share"), [("1%", 0.01), ("0.5 %", 0.005), (0.02, 0.02), ("off", None), (None, None)]
)
def test_an_overhead_is_a_share_or_off(text, share):
    assert aorta.record.RecorderSettings(overhead=text).limit == share


def test_a_step_that_a_profiler_traces_is_recorded_and_tells_no_cost(tmp_path, monkeypatch):
    """It is neither a plain step nor one as recorded ones are."""
    monkeypatch.setattr("aorta.record.open_steps.profiler_is_on", lambda: True)
    with aorta.instrument(tmp_path) as recorder:
        recorder._sampling._plan = sampling.Plan(0, 0, 1024, 10**9)
        for _ in range(NUM_FIRST + 60):
            with recorder.step():
                pass
    lines = list(read_steps(tmp_path / "rank_0_metrics.jsonl", []))
    assert all(line.is_recorded for line in lines)
    assert read_run(tmp_path).overhead.cost is None


def test_each_step_with_a_checkpoint_is_kept_from_the_usual_ones(tmp_path, monkeypatch):
    """Also where all steps between two of them went on the short way."""
    interrupted: list[int] = []
    with record_every(aorta.instrument(tmp_path / "run"), 10**6) as recorder:
        monkeypatch.setattr(Sampling, "goes_on", lambda *_: True)
        monkeypatch.setattr(Sampling, "interrupted", lambda _: interrupted.append(number))
        number, went_on = 0, []
        step = recorder.step().__enter__()
        for number in range(12):
            if number in (5, 9):
                torch.save(1, tmp_path / "checkpoint.pt")
            went_on.append(recorder.steps.goes_on(lambda _: None, time.monotonic_ns()))
            if not went_on[-1]:
                step.__exit__(None, None, None)
                step = recorder.step().__enter__()
        interrupted, seen = [], interrupted
        step.__exit__(None, None, None)
    assert [number for number in range(12) if not went_on[number]] == [0, 5, 9]
    assert seen == [0, 5, 9]


def test_steps_that_a_program_marks_have_the_same_lines_on_the_short_way(tmp_path, monkeypatch):
    def lines(name, cheaply):
        monkeypatch.setattr(Sampling, "goes_on", lambda *_: cheaply)
        with record_every(aorta.instrument(tmp_path / name), 10**6) as recorder:
            for number in (0, 1, 2, 3, 4, 5, 6, 9, 10, 11):  # one is logged, some are skipped
                with recorder.step(global_step=number) as step:
                    assert recorder.journal.current is step.step
                    if number == 4:
                        step.log(loss=0.5)
        return [
            msgspec.to_builtins(line) for line in read_steps(tmp_path / name / "rank_0_metrics.jsonl", [])
        ]

    short, long = lines("short", True), lines("long", False)
    assert [line["global_step"] for line in short] == [0, 1, 2, 3, 4, 5, 6, 9, 10, 11]
    for key in ("loss", "gap", "rollbacks"):
        assert [line.get(key) for line in short] == [line.get(key) for line in long]
    told = {"not_measured"}  # once for steps that are sent together
    assert [set(line) - told for line in short] == [set(line) - told for line in long]
    assert [line.get("loss") for line in short].index(0.5) == 4
