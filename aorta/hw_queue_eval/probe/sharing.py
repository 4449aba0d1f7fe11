"""Which streams share a hardware queue.

One run per stream i: i gets a long kernel and a short one, then every other stream a short one. What
starts only after the long kernel sits behind i in a queue. All rows together are a relation between
streams that must be symmetric and transitive if streams have queues at all; where it is not, that is
reported.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.hw_queue_eval.probe.machine import Floats, Machine, Op, Spin

SHORT_US = 20.0
LONG_SPINS = 3
"""The long kernel over all short ones of a run in a row, so that no queue of these is taken for it."""
PAIR_US = 200.0
PAIRS_TRIED = 4

Relation = NDArray[np.bool_]
Verdict = Literal["separate", "start", "barrier", "unclear"]


class PairTest(msgspec.Struct, frozen=True, kw_only=True):
    """i: K K, j: K. K of j ends after 1 spin (separate), 2 (start order), 3 (barrier)."""

    streams: tuple[int, int]
    finish_spins: float
    verdict: Verdict


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """Streams by the queue they are on."""

    classes: list[list[int]]
    contradictions: int
    """Pairs of which one row says that they share a queue and another that they do not."""
    pairs: list[PairTest]
    """Of streams of one class and of two, as a second opinion."""
    pairs_agree: bool
    primed: bool

    @property
    def each_its_own(self) -> bool:
        return all(len(members) == 1 for members in self.classes)


def sharing(machine: Machine) -> Sharing:
    """Runs one row per stream and a few pairs."""
    num = machine.num_streams
    behind = np.zeros((num, num), dtype=np.bool_)
    primed = True
    for first in range(num):
        outcome = machine.run(row_program(num, first))
        behind[first] = behind_first(outcome.start_us, num, first)
        primed = primed and outcome.primed
    classes, contradictions = partition(behind)
    pairs = [_pair(machine, pair) for pair in pairs_to_try(classes)]
    return Sharing(
        classes=classes,
        contradictions=contradictions,
        pairs=pairs,
        pairs_agree=all(_agrees(test, classes) for test in pairs),
        primed=primed,
    )


def long_us(num_streams: int) -> float:
    return LONG_SPINS * (num_streams + 1) * SHORT_US


def row_program(num_streams: int, first: int) -> list[Op]:
    others = [stream for stream in range(num_streams) if stream != first]
    return [
        Spin(first, long_us(num_streams)),
        Spin(first, SHORT_US),
        *[Spin(stream, SHORT_US) for stream in others],
    ]


def behind_first(start_us: Floats, num_streams: int, first: int) -> Relation:
    """By stream: whether its kernel of row_program started only after the long one."""
    behind = np.zeros(num_streams, dtype=np.bool_)
    others = [stream for stream in range(num_streams) if stream != first]
    behind[others] = start_us[2:] - start_us[0] > 2 / 3 * long_us(num_streams)
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
    """When the second stream's kernel ended, in spins, and what that says."""
    spins = float(end_us[2] - start_us.min()) / PAIR_US
    verdicts: dict[int, Verdict] = {1: "separate", 2: "start", 3: "barrier"}
    nearest = round(spins)
    return spins, verdicts.get(nearest, "unclear") if abs(spins - nearest) < 0.25 else "unclear"


def _pair(machine: Machine, pair: tuple[int, int]) -> PairTest:
    outcome = machine.run(pair_program(*pair))
    spins, verdict = judge_pair(outcome.start_us, outcome.end_us)
    return PairTest(streams=pair, finish_spins=spins, verdict=verdict)


def _agrees(test: PairTest, classes: Sequence[Sequence[int]]) -> bool:
    together = any(set(test.streams) <= set(members) for members in classes)
    return test.verdict in (("start", "barrier") if together else ("separate",))
