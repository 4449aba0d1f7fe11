"""Collectives of steps in which none is seen: the learned ones where they fit, none where they do not."""

import pytest

import aorta
from aorta.record.learned_calls import AGREE, Learner
from aorta.record.overhead import BLOCK, NUM_FIRST, SEEN_EVERY, is_seen
from aorta.records.reader import read_run
from aorta.steps.notes import CollectiveCall, Group, RecordedStep
from tests.dist.launch import run_ranks
from tests.record import learned_steps
from tests.record.learned_steps import ran


class Backends:
    """Steps of calls in two groups, which count them."""

    def __init__(self) -> None:
        self.groups = {key: Group(key, key, [0, 1], "nccl") for key in ("a", "b")}
        self.counts = dict.fromkeys(self.groups, 0)
        self.learner = Learner(lambda: dict(self.counts), lambda counts: dict(counts))

    def step(self, *calls: tuple[str, str, int], unseen: bool = False, counted: int = 1) -> RecordedStep:
        """A step with calls of (group, operation, bytes), each counted so many times by its backend."""
        step = RecordedStep(0, 0, 0, None)
        step.by_kernels, step.is_unseen = True, unseen
        self.learner.begin(step, dict(self.counts))
        for key, op, num_bytes in calls:
            self.counts[key] += counted
            if not unseen:
                step.calls.append(CollectiveCall(self.groups[key], op, num_bytes, "float32", True))
        self.learner.end(step, dict(self.counts))
        return step


USUAL = (("a", "all_reduce", 64), ("b", "all_gather", 32))
OTHER = (*USUAL, ("a", "all_reduce", 8))


@pytest.fixture
def backends() -> Backends:
    backends = Backends()
    for _ in range(AGREE + 1):
        assert not backends.learner.is_sure
        backends.step(*USUAL)
    assert backends.learner.is_sure
    return backends


def test_an_unseen_step_has_the_calls_of_those_that_were_seen_with_numbers_of_its_own(backends):
    learned = backends.step(*USUAL, unseen=True).learned
    assert [(call.op, call.bytes) for call in learned.calls] == [("all_reduce", 64), ("all_gather", 32)]
    assert learned.first_numbers == {"a": AGREE + 1, "b": AGREE + 1}


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(OTHER, id="one-more"),
        pytest.param(USUAL[:1], id="one-less"),
        pytest.param((("a", "all_reduce", 64),) * 2, id="as-many-in-another-group"),
        pytest.param((), id="none"),
    ],
)
def test_a_step_whose_number_is_another_has_no_calls_and_the_next_ones_are_seen(backends, calls):
    assert backends.step(*calls, unseen=True).learned is None
    assert not backends.learner.is_sure


def test_two_kinds_of_steps_are_learned_by_their_numbers(backends):
    backends.step(*OTHER)
    for _ in range(AGREE):
        backends.step(*USUAL)
    kinds = [backends.step(*calls, unseen=True).learned for calls in (OTHER, USUAL, OTHER)]
    assert [len(learned.calls) for learned in kinds] == [3, 2, 3]


def test_a_step_that_comes_seldom_is_learned_in_the_end():
    """One step of 50 reduces more: the first ones are not known, and are looked for longer and longer."""
    backends, known = Backends(), []
    for number in range(1000):
        calls = OTHER if number % 50 == 49 else USUAL
        step = backends.step(*calls, unseen=backends.learner.is_sure)
        if step.is_unseen:
            known.append(step.learned is not None)
    assert known.count(False) < 6
    assert all(known[-200:])
    assert len(known) > 600


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([[("a", "all_reduce", 64 + n)] for n in range(40)], id="sizes-differ"),
        pytest.param(
            [[("a", ("all_reduce", "all_gather")[n % 2], 64)] for n in range(40)], id="ops-take-turns"
        ),
    ],
)
def test_steps_that_differ_in_more_than_their_number_are_always_seen(steps):
    backends = Backends()
    for calls in steps:
        backends.step(*calls)
        assert not backends.learner.is_sure


def test_calls_that_backends_count_otherwise_are_always_seen():
    """NCCL does not count sends, gloo counts what its barriers are made of."""
    backends = Backends()
    for _ in range(40):
        backends.step(*USUAL, counted=2)
    assert not backends.learner.is_sure


def test_what_a_thread_refutes_is_forgotten(backends):
    backends.learner.refute()
    assert backends.step(*USUAL, unseen=True).learned is None
    for _ in range(2 * AGREE):
        assert not backends.learner.is_sure
        backends.step(*USUAL)


def test_a_block_of_sixteen_is_seen_whatever_the_rate():
    for every in (1, 8, 64, 256):
        blocks = [block for block in range(2, 200_000) if (block + 1) % every == 0]
        num_seen = sum(is_seen(NUM_FIRST + block * BLOCK) for block in blocks)
        assert num_seen / len(blocks) == pytest.approx(1 / SEEN_EVERY, rel=0.25)


# -- two ranks, over gloo, on a device that is not there ------------------------------------------------

SEEN = (3, False, [("all_reduce", 16), ("all_gather", 32), ("all_reduce", 64)])
LEARNED = (3, True, SEEN[2])


def kinds(ranks: list[dict]) -> list[tuple]:
    """(number, learned, collectives) of each step, the same on all ranks."""
    found = [
        [
            (
                line["num_collectives"],
                line.get("calls_learned", False),
                line.get("collectives") and [(call["op"], call["bytes"]) for call in line["collectives"]],
            )
            for line in rank["lines"]
        ]
        for rank in ranks
    ]
    return found[0] if all(other == found[0] for other in found) else []


@pytest.mark.processes
def test_collectives_of_unseen_steps_have_numbers_and_times(tmp_path):
    ranks = run_ranks(ran, 2, tmp_path, learned_steps.Program, 60, "off")

    assert kinds(ranks) == [SEEN] * 32 + [LEARNED] * 28
    for rank in ranks:
        assert rank["seen"] == list(range(32))
        calls = [call for line in rank["lines"] for call in line["collectives"]]
        if rank["happened"]:  # torch keeps a flight record of gloo since 2.13
            assert [(call["op"], call["bytes"]) for call in calls] == rank["happened"][-180:]
        assert [call["seq"] for call in calls] == list(range(180))
        assert all(call["start_ms"] < call["end_ms"] for call in calls)
        assert all(call["algbw_gb_s"] > 0 for call in calls)
        assert rank["coverage"]["why_all_seen"] is None
        matched = rank["coverage"]["kernel_records"]["matched"]
        assert (matched["num_matched"], matched["num_unseen"], matched["num_refuted"]) == (180, 28, 0)


@pytest.mark.processes
def test_a_step_with_one_more_says_that_its_collectives_are_not_known(tmp_path):
    ranks = run_ranks(ran, 2, tmp_path, learned_steps.OneMore, 64, "off")

    more = kinds(ranks)[60]
    assert more == (4, False, None)  # as many as kernels
    assert "number" in ranks[0]["lines"][60]["not_measured"]["collectives"]
    assert kinds(ranks)[61:] == [SEEN] * 3
    assert [call["seq"] for call in ranks[0]["lines"][61]["collectives"]] == [184, 185, 186]


@pytest.mark.processes
def test_as_many_in_another_order_are_not_called_by_the_old_names(tmp_path):
    ranks = run_ranks(ran, 2, tmp_path, learned_steps.OtherOrder, 76, "off")

    changed = [[("all_gather", 32), ("all_reduce", 64), ("all_reduce", 16)], None]
    for rank in ranks:
        lines = rank["lines"][60:]
        calls = [
            line.get("collectives") and [(c["op"], c["bytes"]) for c in line["collectives"]] for line in lines
        ]
        assert all(one in changed for one in calls)
        assert "kernels" in lines[0]["not_measured"]["collectives"]
        assert calls[-1] == changed[0]  # seen again


@pytest.mark.processes
def test_a_run_of_the_first_steps_alone_says_why_all_are_seen(tmp_path):
    for rank in run_ranks(ran, 2, tmp_path, learned_steps.Program, 20, "off"):
        assert rank["coverage"]["why_all_seen"] == "too few steps were recorded behind the first 24"


def test_a_run_on_a_cpu_says_why_all_are_seen(tmp_path):
    with aorta.instrument(tmp_path) as recorder, recorder.step():
        pass
    assert (
        read_run(tmp_path).coverage["why_all_seen"] == "there is no device: nothing else tells of collectives"
    )
