"""Streams that share a hardware queue, and the rule by which a stream gets one.

One run per stream i, a row: i gets a long kernel and a short one, then every other stream a short one. What
starts only after the long kernel sits behind i in a queue. Where streams own their queues all rows together
are a symmetric and transitive relation, and its groups are the queues. Where rows contradict each other the
queues are dealt out as work is submitted. Then the rules of `placement` are tried on all rows and on runs in
which streams come in mixed order and come again; and rows of runs in which every stream launched a kernel
first, in order, show whether the queues of a run can be chosen.
"""

import random
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.queues.probe.machine import Floats, Op, Outcome, ProbeMachine, QueueRecord, QueueWait, Spin
from aorta.queues.probe.parts.placement import (
    RULES,
    Rule,
    claiming_program,
    keeping_program,
    kernels,
    predicted_start_us,
    queues_of,
    which_is_late,
)

SHORT_US = 20.0
LONG_SPINS = 3
"""The long kernel over all short ones of a run in a row, so that no queue of these is taken for it."""
PAIR_US = 200.0
PAIRS_TRIED = 4
MIXED_RUNS = 16
EXPLAINS = 0.95
"""Share of the runs that a rule must predict, every kernel of them, to be believed."""

Relation = NDArray[np.bool_]
Verdict = Literal["separate", "start", "barrier", "unclear"]
Kind = Literal["one_queue", "unshared", "fixed", "dynamic", "unknown"]


class PairTest(msgspec.Struct, frozen=True, kw_only=True):
    """i: K K, j: K. K of j ends after 1 spin (separate), 2 (start order), 3 (barrier)."""

    streams: tuple[int, int]
    finish_spins: float
    verdict: Verdict


class Dealing(msgspec.Struct, frozen=True, kw_only=True):
    """Way in which queues are dealt out as work is submitted."""

    rule: Rule | None
    """Rule that predicts at least EXPLAINS of the runs; None where none does."""
    queues: int | None
    """Number with which it does; found without the staircase."""
    runs: int
    explained: dict[Rule, int]
    """Runs of which the rule predicts every kernel, with the number of queues that suits it best."""
    late_in_mixed_runs: list[list[int]]
    """Kernels, by place, that started only after the long one, by run of mixed_program(streams, run)."""
    keeps_when_idle: bool | None
    """True if a stream that ran dry keeps its queue while others are busy; None where undecided."""
    wait_takes_a_queue: bool | None
    """True if a wait takes a queue on a stream without kernels, as a kernel does; None where undecided."""
    record_takes_a_queue: bool | None

    @property
    def best(self) -> Rule:
        """The rule that explains most runs, believed or not."""
        return max(RULES, key=lambda rule: self.explained[rule])


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """Streams by the queue they are on."""

    kind: Kind
    """one_queue: all wait for each other; unshared: nobody for anybody; fixed: a stream has one queue;
    dynamic: queues are dealt out as work is submitted, by a rule; unknown: … by no rule that was tried."""
    classes: list[list[int]]
    """Empty where streams have no fixed queue."""
    contradictions: int
    """Pairs of which one row says that they share a queue and another that they do not."""
    dealing: Dealing | None
    """None where rows agree."""
    behind: list[list[int]]
    """Streams that were seen to wait behind each stream."""
    pairs: list[PairTest]
    """Tests of pairs of one class and of two, as a second opinion."""
    pairs_agree: bool
    primed: bool

    @property
    def each_its_own(self) -> bool:
        return self.kind == "unshared"

    @property
    def queues(self) -> int | None:
        """Number of queues: that of the classes, else that which the rule needs."""
        return len(self.classes) or (self.dealing.queues if self.dealing else None)


def sharing(machine: ProbeMachine) -> Sharing:
    """Runs one row per stream and a few pairs; where rows contradict each other looks for the rule."""
    behind, primed = _rows(machine)
    classes, contradictions = partition(behind)
    dealing = None
    if contradictions:
        classes = []
        dealing, primed_too = _deal(machine, behind)
        primed = primed and primed_too
    pairs = [_pair(machine, pair) for pair in pairs_to_try(classes)]
    return Sharing(
        kind=_kind(classes, dealing),
        classes=classes,
        contradictions=contradictions,
        dealing=dealing,
        behind=[np.nonzero(row)[0].tolist() for row in behind],
        pairs=pairs,
        pairs_agree=all(_agrees(test, classes) for test in pairs),
        primed=primed,
    )


def _kind(classes: Sequence[Sequence[int]], dealing: Dealing | None) -> Kind:
    if dealing is not None:
        return "dynamic" if dealing.rule else "unknown"
    if len(classes) == 1:
        return "one_queue"
    return "fixed" if any(len(members) > 1 for members in classes) else "unshared"


def _rows(machine: ProbeMachine) -> tuple[Relation, bool]:
    """[first, other]: whether the other waited behind the first; whether all runs were primed."""
    num = machine.num_streams
    behind = np.zeros((num, num), dtype=np.bool_)
    primed = True
    for first in range(num):
        outcome = machine.run(row_program(num, first))
        behind[first] = behind_first(outcome.start_us, num, first)
        primed = primed and outcome.primed
    return behind, primed


def _deal(machine: ProbeMachine, behind: Relation) -> tuple[Dealing, bool]:
    """Dealing as far as the rule is known, and whether all runs were primed."""
    num = machine.num_streams
    rows = [_seen_row(behind, first) for first in range(num)]
    primed = True
    for seed in range(MIXED_RUNS):
        program = mixed_program(num, seed)
        outcome = machine.run(program)
        rows.append((program, late(outcome, program)))
        primed = primed and outcome.primed
    explained, rule, queues = explain(rows)
    dealing = Dealing(
        rule=rule,
        queues=queues,
        runs=len(rows),
        explained=explained,
        late_in_mixed_runs=[np.nonzero(was_late)[0].tolist() for _, was_late in rows[num:]],
        keeps_when_idle=_keeps(machine, queues),
        wait_takes_a_queue=_takes(machine, queues, QueueWait),
        record_takes_a_queue=_takes(machine, queues, QueueRecord),
    )
    return dealing, primed


def _keeps(machine: ProbeMachine, queues: int | None) -> bool | None:
    """None with fewer than 4 queues, where the gate may block the kernel that must end early."""
    if queues is None or not 4 <= queues < machine.num_streams:
        return None
    last = _late_at_the_end(machine, keeping_program(queues, long_us(queues), SHORT_US))
    return None if last is None else last == "last"


def _takes(
    machine: ProbeMachine, queues: int | None, operation: type[QueueWait | QueueRecord]
) -> bool | None:
    if queues is None or not 2 <= queues < machine.num_streams - 1:
        return None
    program = claiming_program(queues, long_us(queues), SHORT_US, operation)
    last = _late_at_the_end(machine, program)
    return None if last is None else last == "last but one"


def _late_at_the_end(machine: ProbeMachine, program: Sequence[Op]) -> str | None:
    outcome = machine.run(program)
    return which_is_late(late(outcome, program).tolist()) if outcome.primed else None


Seen = tuple[Sequence[Op], Relation]
"""A program whose first kernel is the long one, and which of its kernels started only after that."""


def explain(rows: Sequence[Seen]) -> tuple[dict[Rule, int], Rule | None, int | None]:
    """Runs that each rule predicts; the rule that is believed, and with how many queues.

    The number is the one with which the rule predicts most of the first and the last two runs, and among
    those most kernels; all runs then judge it.
    """
    few = [rows[0], *rows[-2:]]
    num_streams = 1 + max(op.stream for op in rows[0][0])
    explained: dict[Rule, int] = {}
    queues_by: dict[Rule, int] = {}
    for rule in RULES:
        queues_by[rule] = max(
            range(1, num_streams + 1),
            key=lambda queues: _closeness(few, rule, queues),
        )
        explained[rule] = sum(not _wrong(run, rule, queues_by[rule]) for run in rows)
    best = max(RULES, key=lambda rule: explained[rule])
    if explained[best] < EXPLAINS * len(rows):
        return explained, None, None
    return explained, best, queues_by[best]


def _closeness(rows: Sequence[Seen], rule: Rule, queues: int) -> tuple[int, int]:
    wrong = [_wrong(run, rule, queues) for run in rows]
    return wrong.count(0), -sum(wrong)


def _wrong(run: Seen, rule: Rule, queues: int) -> int:
    """Kernels of the run that the rule gets wrong."""
    program, seen_late = run
    # A queue's second kernel in line is late with start order as with barriers: both mean the same here.
    start_us = predicted_start_us(program, queues_of(program, rule, queues), "start")
    return int((_after_long(start_us, program) != seen_late).sum())


def late(outcome: Outcome, program: Sequence[Op]) -> Relation:
    """True for each kernel that started only after the first, long one."""
    return _after_long(outcome.start_us, program)


def _after_long(start_us: Floats, program: Sequence[Op]) -> Relation:
    first = next(kernels(program))
    assert isinstance(first, Spin)
    is_after: Relation = start_us - start_us[0] > 2 / 3 * first.us
    return is_after


def _seen_row(behind: Relation, first: int) -> Seen:
    program = row_program(len(behind), first)
    streams = [op.stream for op in program]
    return program, np.array([False, True, *behind[first][streams[2:]].tolist()])


def mixed_program(num_streams: int, seed: int) -> list[Op]:
    """A row whose streams come in random order, some of them once more later."""
    shuffle = random.Random(seed)
    order = shuffle.sample(range(num_streams), num_streams)
    program: list[Op] = [Spin(order[0], long_us(2 * num_streams)), Spin(order[0], SHORT_US)]
    for index, stream in enumerate(order[1:], start=1):
        program.append(Spin(stream, SHORT_US))
        if shuffle.random() < 0.25:
            program.append(Spin(shuffle.choice(order[: index + 1]), SHORT_US))
    return program


def long_us(num_streams: int) -> float:
    return LONG_SPINS * (num_streams + 1) * SHORT_US


def row_program(num_streams: int, first: int) -> list[Op]:
    other_streams = [stream for stream in range(num_streams) if stream != first]
    return [
        Spin(first, long_us(num_streams)),
        Spin(first, SHORT_US),
        *[Spin(stream, SHORT_US) for stream in other_streams],
    ]


def behind_first(start_us: Floats, num_streams: int, first: int) -> Relation:
    """True for each stream whose kernel of row_program started only after the long one."""
    behind = np.zeros(num_streams, dtype=np.bool_)
    other_streams = [stream for stream in range(num_streams) if stream != first]
    behind[other_streams] = start_us[2:] - start_us[0] > 2 / 3 * long_us(num_streams)
    return behind


def partition(behind: Relation) -> tuple[list[list[int]], int]:
    """Classes of streams joined by any row, and the number of pairs about which the rows disagree."""
    num = len(behind)
    class_of = list(range(num))
    for i, j in zip(*np.nonzero(behind | behind.T), strict=True):
        low, high = sorted((class_of[i], class_of[j]))
        class_of = [low if name == high else name for name in class_of]
    names = np.array(class_of)
    expected = (names[:, None] == names[None, :]) & ~np.eye(num, dtype=np.bool_)
    wrong = expected != behind
    contradictions = int(np.triu(wrong | wrong.T).sum())
    return [np.nonzero(names == name)[0].tolist() for name in sorted(set(class_of))], contradictions


def pairs_to_try(classes: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """PAIRS_TRIED of streams that share a queue and as many of streams that do not."""
    shared = [(members[0], members[1]) for members in classes if len(members) > 1]
    separate = [(a[0], b[-1]) for a, b in zip(classes, classes[1:], strict=False)]
    return shared[:PAIRS_TRIED] + separate[:PAIRS_TRIED]


def pair_program(first: int, second: int) -> list[Op]:
    return [Spin(first, PAIR_US), Spin(first, PAIR_US), Spin(second, PAIR_US)]


def judge_pair(start_us: Floats, end_us: Floats) -> tuple[float, Verdict]:
    """End of the second stream's kernel, in spins, and the verdict from it."""
    spins = float(end_us[2] - start_us.min()) / PAIR_US
    verdicts: dict[int, Verdict] = {1: "separate", 2: "start", 3: "barrier"}
    nearest = round(spins)
    return spins, verdicts.get(nearest, "unclear") if abs(spins - nearest) < 0.25 else "unclear"


def _pair(machine: ProbeMachine, pair: tuple[int, int]) -> PairTest:
    outcome = machine.run(pair_program(*pair))
    spins, verdict = judge_pair(outcome.start_us, outcome.end_us)
    return PairTest(streams=pair, finish_spins=spins, verdict=verdict)


def _agrees(test: PairTest, classes: Sequence[Sequence[int]]) -> bool:
    together = any(set(test.streams) <= set(members) for members in classes)
    return test.verdict in (("start", "barrier") if together else ("separate",))
