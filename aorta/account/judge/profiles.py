"""Sampled stacks of a run as trees of time: each rank, slow steps against usual ones, and in which lines they
differ."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np

from aorta.account.judge.cells import account_of, is_device_busy
from aorta.account.judge.judged import UNLIKE, looked_at, usual_step
from aorta.account.judge.occasional import occasions
from aorta.account.judge.stacks import FEWEST, MOST, MOST_RANKS, Samples, is_a_wait, timed_samples_of
from aorta.account.model import Run
from aorta.account.numbers import counted, number, quantity
from aorta.records.stacks import DOING, STACK_PHASES, Does, StackFrame, StackPhase
from aorta.timeline.arrays import Flags, Floats, Ints

LEAST_DIFFERENCE = 0.02
"""Of a step, from which on a line's difference is told."""
LEAST_SHOWN = 0.05
"""Of a step, from which on a line is told as one of the busiest."""
SURE = 2.0
"""Standard errors that a difference must be above 0."""
CHANCE = 0.05
"""That a side has no sample of a line that it is in."""
OF_EACH_STEP: tuple[StackPhase, ...] = ("forward", "backward", "optimizer")
"""Phases that every step has: a side without a sample of one was not sampled there."""
DOING_WORDS: dict[Does, str] = {
    "waits": "waits for the device",
    "runs": "runs",
    "ready": "waits for a core",
    "sleeps": "sleeps",
    "locked_out": "holds the interpreter's lock, which the thread that trains waits for",
}


@dataclass(frozen=True, slots=True)
class Part:
    """Samples of some steps of one rank, in ms of the mean of these steps."""

    samples: Samples
    rows: Ints
    """Places of its samples among those of the rank."""
    ms: Floats
    """[sample]: they add up to the mean step."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the program, and the time of a step in which it is the innermost one, in one phase."""

    text: str
    """'augment(), train.py:5'"""
    calls: str
    """The library's function in which most of it is: 'sleep of time'; '' where it is in no single one."""
    doing: Does
    ms: float
    against_ms: float
    """The same of the other side; 0 of either where that has no sample."""
    num_samples: int

    @property
    def difference_ms(self) -> float:
        return self.ms - self.against_ms


def part_of(judged: Run, rank: int, is_meant: Flags | None = None) -> Part | None:
    """Of a rank's judged steps, or those of them that are meant; None where nothing was sampled there. A
    phase has as much as the host's spans tell."""
    samples = timed_samples_of(judged, rank, "data")
    if samples is None:
        return None
    which = samples.is_judged.copy()
    lengths = judged.values("step_ms")[judged.ranks.index(rank)]
    if is_meant is not None:
        which &= is_meant[samples.column]
        lengths = lengths[is_meant]
    rows = np.flatnonzero(which)
    ms = samples.ms[rows]
    if not ms.sum() > 0 or not np.isfinite(lengths).any():
        return None
    return Part(samples, rows, ms * (float(np.nanmean(lengths)) / ms.sum()))


def sampled_ranks(judged: Run, named: Sequence[int] = ()) -> list[int]:
    """Ranks that stand for all: those named, then the first ones."""
    ranks = [*dict.fromkeys([*(rank for rank in named if rank in judged.ranks), *judged.ranks])]
    return sorted(ranks[:MOST_RANKS])


def rank_parts(judged: Run, named: Sequence[int] = ()) -> dict[int, Part]:
    """By rank, of those that were sampled."""
    parts = {rank: part_of(judged, rank) for rank in sampled_ranks(judged, named)}
    return {rank: part for rank, part in parts.items() if part is not None}


def both_parts(judged: Run, is_meant: Flags, named: Sequence[int]) -> tuple[list[Part], list[Part]] | None:
    """The steps that are meant, on each rank, and the others; None where one of these was not sampled."""
    ranks = sampled_ranks(judged, named)
    both = [[part_of(judged, rank, of) for of in (is_meant, ~is_meant)] for rank in ranks]
    pairs = [(one, other) for one, other in both if one is not None and other is not None]
    return ([one for one, _ in pairs], [other for _, other in pairs]) if pairs else None


def slow_and_usual(judged: Run, named: Sequence[int] = ()) -> tuple[list[Part], list[Part], str] | None:
    """The steps that stand apart as slow, on each rank, the others, and which they are ('every tenth step');
    None where there are none, or they were not sampled."""
    lengths = judged.values("step_ms")
    if not lengths.size:
        return None
    mean_ms = np.ma.masked_invalid(lengths).mean(axis=0).filled(0.0)  # of a step that no rank has
    found = occasions(mean_ms, judged.global_step[judged.judged_steps])
    if found is None:
        return None
    parts = both_parts(judged, found.is_slow, named)
    return None if parts is None else (*parts, found.often)


# ---- lines -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """What one side does and the other does not, line by line."""

    title: str
    """'rank 1 against the others'"""
    lines: list[Line]
    """Of a step; first those in which the first side spends more."""


def told_differences(judged: Run, late: int | None) -> list[Difference]:
    """Of the late rank against the others, and of slow steps against usual ones; only what has lines.

    late: the rank that the others wait for.
    """
    found: list[Difference] = []
    slower: list[tuple[str, tuple[list[Part], list[Part]]]] = []
    step_ms = float(np.nanmean(judged.values("step_ms"))) if judged.num_judged else 0.0
    named = [] if late is None else [late]
    parts = rank_parts(judged, named)
    others = [part for rank, part in parts.items() if rank != late]
    if late in parts and others:
        title = f"rank {late} against the others"
        found.append(Difference(title, differences([parts[late]], others, step_ms)))
    slow = slow_and_usual(judged, named)
    if slow is not None:
        slower.append((f"slow steps ({slow[2]}) against usual ones", slow[:2]))
    usual, looked = usual_step(judged), looked_at(judged)
    if usual is not None and usual.ms - usual.recorded_ms >= UNLIKE * usual.ms:
        recorded = looked.global_step[looked.judged_steps]
        parts_of_both = both_parts(judged, ~np.isin(judged.global_step[judged.judged_steps], recorded), named)
        if parts_of_both is not None:
            slower.append(("steps that were not recorded against the shorter ones that were", parts_of_both))
    for title, sides in slower:  # what they do less does not make them longer, nor do waits for a busy device
        lines = [line for line in _told(judged, differences(*sides, step_ms)) if line.doing != "waits"]
        found.append(Difference(title, [line for line in lines if line.difference_ms > 0]))
    return [difference for difference in found if difference.lines]


def told_steps(judged: Run) -> Flags:
    """[judged step]: those of which lines are told: all, but those of the account alone where that is not
    brought to the usual step and the others make the mean another one."""
    looked, step_ms = looked_at(judged), judged.values("step_ms").mean(axis=0)
    is_told: Flags = np.isin(judged.global_step[judged.judged_steps], looked.global_step[looked.judged_steps])
    told_ms = np.nanmean(step_ms[is_told])
    is_alike = abs(np.nanmean(step_ms) - told_ms) < UNLIKE * told_ms
    return np.ones_like(is_told) if is_alike or usual_step(judged) is not None else is_told


def busiest(judged: Run, num: int) -> list[Line]:
    """The lines of the program that the thread that trains is in most, in ms of the account's step: means
    over ranks, from LEAST_SHOWN of it and FEWEST samples on. One that waits for the device counts as any
    other."""
    if not judged.num_judged:
        return []
    told = told_steps(judged)
    sampled_ms = float(np.nanmean(judged.values("step_ms")[:, told]))
    parts = [part_of(judged, rank, told) for rank in sampled_ranks(judged)]
    lines = _told(judged, most([part for part in parts if part is not None], num))
    as_account = (account_of(judged).mean_step_ms or sampled_ms) / sampled_ms
    return [
        replace(line, ms=line.ms * as_account)
        for line in lines
        if line.ms >= LEAST_SHOWN * sampled_ms and line.num_samples >= FEWEST
    ]


def _told(judged: Run, lines: list[Line]) -> list[Line]:
    is_busy = is_device_busy(judged)
    return [replace(line, doing="waits") if is_busy and is_a_wait(line.calls) else line for line in lines]


def line_text(line: Line, is_difference: bool = True) -> str:
    """'+13.4 ms in push(), train.py:22 (the thread sleeps): 13.4 against none sampled, 42 samples'"""
    calls = f" in {line.calls}" if line.calls else ""
    mine, theirs = (number(ms) if ms else "none sampled" for ms in (line.ms, line.against_ms))
    against = f" {mine} against {theirs}," if is_difference else ""
    return (
        f"{quantity(line.difference_ms, 'ms', sign=is_difference)} in {line.text} (the thread"
        f" {DOING_WORDS[line.doing]}{calls}):{against} {counted(line.num_samples, 'sample')}"
    )


@dataclass(slots=True)
class _Sum:
    ms: float = 0.0
    variance: float = 0.0
    num: int = 0
    by_doing: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    by_callee: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def differences(parts: Sequence[Part], others: Sequence[Part], step_ms: float) -> list[Line]:
    """Lines in which one side spends clearly more than the other; those in which `parts` spend more come
    first, the largest difference of each kind first.

    Sides are means of their parts. A difference counts from LEAST_DIFFERENCE of the step on, and from SURE
    standard errors, those of a count of samples (binomial), and from what a side without a sample may have.
    """
    sides = [*_sums(parts, others)]
    sampled = set.intersection(*({phase for _, phase in side} for side in sides))
    found = []
    for key in {*sides[0], *sides[1]}:
        if key[1] in OF_EACH_STEP and key[1] not in sampled:
            continue
        own, other = (side[key] for side in sides)
        difference, error = own.ms - other.ms, (own.variance + other.variance) ** 0.5
        if abs(difference) >= max(LEAST_DIFFERENCE * step_ms, SURE * error) and own.num + other.num >= FEWEST:
            found.append(_line(key[0], own, other))
    return sorted(found, key=lambda line: (line.difference_ms < 0, -abs(line.difference_ms)))


def most(parts: Sequence[Part], num: int) -> list[Line]:
    """Lines of the program that most time is in, the largest first."""
    (sums,) = _sums(parts)
    largest = sorted(sums.items(), key=lambda entry: -entry[1].ms)[:num]
    return [_line(frame, own, _Sum()) for (frame, _), own in largest]


def _line(frame: StackFrame, own: _Sum, other: _Sum) -> Line:
    larger = own if own.ms >= other.ms else other
    doing = max(larger.by_doing, key=lambda name: larger.by_doing[name])
    callee = max(larger.by_callee, key=lambda name: larger.by_callee[name])
    callee = callee if larger.by_callee[callee] >= MOST * larger.ms else ""
    return Line(frame.text, callee, DOING[doing], own.ms, other.ms, own.num + other.num)


def _sums(*sides: Sequence[Part]) -> Iterator[defaultdict[tuple[StackFrame, StackPhase], _Sum]]:
    """Of each side, by the innermost line of the program, and by phase where several are reached from it, as
    from a library's loop. What is in no line is left out, and of a line without a sample by CHANCE missed."""
    seen = [[*_seen(parts)] for parts in sides]
    reached: dict[StackFrame, set[StackPhase]] = defaultdict(set)
    for line, phase, *_ in chain.from_iterable(seen):
        reached[line] |= {phase} & {*OF_EACH_STEP, "data", "rest"}
    for parts, samples in zip(sides, seen, strict=True):
        sums: defaultdict[tuple[StackFrame, StackPhase], _Sum] = defaultdict(_Sum)
        for line, phase, callee, doing, ms in samples:
            phases = reached[line] - {"rest"}
            several = len(phases) > 1 or reached[line] == {"backward", "rest"}
            (of_phase,) = (reached[line] & {phase} if several else phases) or {"rest"}
            entry = sums[line, of_phase]
            entry.ms += ms
            entry.variance += ms * ms
            entry.num += 1
            entry.by_doing[doing] += ms
            entry.by_callee[callee] += ms
        step_ms = sum(float(part.ms.sum()) for part in parts) / max(len(parts), 1)
        for entry in sums.values():
            entry.variance *= max(1.0 - entry.ms / step_ms, 0.0)  # what all samples are in is no chance
        part = 1 - CHANCE ** (1 / max(sum(len(part.rows) for part in parts), 1))
        sums.default_factory = partial(_Sum, variance=(part * step_ms / SURE) ** 2)
        yield sums


def _seen(parts: Sequence[Part]) -> Iterator[tuple[StackFrame, StackPhase, str, int, float]]:
    """Of each sample in a line of the program: that, its phase, the library's function, and ms of a step."""
    for part in parts:
        stacks = part.samples.stacks
        innermost: list[StackFrame | None] = []
        for parent, place in stacks.nodes:  # a caller comes before what it calls
            frame = stacks.frames[place]
            above = innermost[parent] if parent >= 0 else None
            innermost.append(frame if frame.is_program else above)
        rows = part.samples.rows[part.rows].tolist()
        for row, ms in zip(rows, (part.ms / len(parts)).tolist(), strict=True):
            line, leaf = innermost[row[5]], stacks.frames[stacks.nodes[row[5]][1]]
            if line is not None:
                yield line, STACK_PHASES[row[2]], "" if leaf.is_program else leaf.text, row[3], ms


# ---- trees -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tree:
    """Frames under their callers, of several parts at once. Node 0 is the whole step."""

    frames: list[StackFrame | None]
    """None of node 0."""
    parents: list[int]
    """A caller comes before what it calls."""
    ms: Floats
    """[part, node]: time in which the node's frame is the innermost one."""
    asleep_ms: Floats
    """[node]: of all parts together, the time in which the thread slept there."""

    @property
    def total_ms(self) -> Floats:
        """[part, node]: with all that is below."""
        total = self.ms.copy()
        for node in range(len(self.parents) - 1, 0, -1):
            total[:, self.parents[node]] += total[:, node]
        return total


def tree(parts: Sequence[Part], most_nodes: int) -> Tree:
    """Nodes with least time are left out, and count as their callers."""
    frames: list[StackFrame | None] = [None]
    parents = [-1]
    ids: dict[tuple[int, StackFrame], int] = {}
    placed: list[tuple[Part, Ints]] = []
    for part in parts:
        stacks = part.samples.stacks
        needed = np.zeros(len(stacks.nodes), dtype=bool)
        needed[part.samples.rows[part.rows, 5]] = True
        for node in range(len(stacks.nodes) - 1, -1, -1):
            if needed[node] and stacks.nodes[node][0] >= 0:
                needed[stacks.nodes[node][0]] = True
        node_of = np.zeros(len(stacks.nodes), dtype=np.int64)
        for node in np.flatnonzero(needed).tolist():
            parent, place = stacks.nodes[node]
            key = (int(node_of[parent]) if parent >= 0 else 0, stacks.frames[place])
            if key not in ids:
                ids[key] = len(frames)
                frames.append(key[1])
                parents.append(key[0])
            node_of[node] = ids[key]
        placed.append((part, node_of))
    ms, asleep = np.zeros((len(parts), len(frames))), np.zeros(len(frames))
    for i, (part, node_of) in enumerate(placed):
        nodes = node_of[part.samples.rows[part.rows, 5]]
        ms[i] = np.bincount(nodes, part.ms, len(frames))
        sleeps = part.samples.rows[part.rows, 3] == DOING.index("sleeps")
        asleep += np.bincount(nodes, np.where(sleeps, part.ms, 0.0), len(frames))
    return _pruned(Tree(frames, parents, ms, asleep), most_nodes)


def _pruned(whole: Tree, most_nodes: int) -> Tree:
    num = len(whole.frames)
    if num <= most_nodes:
        return whole
    # A caller has at least the time of what it calls, and comes first among equals.
    order = np.argsort(-whole.total_ms.max(axis=0), kind="stable")
    kept = np.sort(order[:most_nodes])
    place = np.zeros(num, dtype=np.int64)
    place[kept] = np.arange(len(kept))
    is_kept = np.zeros(num, dtype=bool)
    is_kept[kept] = True
    for node in range(num):
        if not is_kept[node]:
            place[node] = place[whole.parents[node]]
    ms = np.stack([_summed(row, place, len(kept)) for row in whole.ms])
    return Tree(
        [whole.frames[node] for node in kept.tolist()],
        [-1, *(int(place[whole.parents[node]]) for node in kept[1:].tolist())],
        ms,
        _summed(whole.asleep_ms, place, len(kept)),
    )


def _summed(ms: Floats, place: Ints, num: int) -> Floats:
    return np.asarray(np.bincount(place, ms, num), dtype=np.float64)
