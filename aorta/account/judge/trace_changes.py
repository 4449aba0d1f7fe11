"""What changed between two traces: kernels, operators and collectives of one beside those of the other.

A piece of work is matched by what is nearest: name, operator, shapes and module; then, where another kernel
does the same, operator and shapes; then its name alone; then its operator; then its place in the order of a
step, among kernels of a class (ROCm against CUDA, where no name is the same). What is left is on one side
only.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from math import comb
from typing import Literal, NamedTuple

import numpy as np

from aorta.account.load.rank.kernels import kernel_name
from aorta.account.numbers import number
from aorta.timeline.arrays import Floats
from aorta.traces.classify import COMMUNICATION
from aorta.traces.inventory import Inventory, WorkKey, WorkTimes

Table = Literal["class", "kernel", "operator", "collective"]
MATCHED = Literal["all", "operator and shapes", "name", "operator", "order", "class", "one side only"]
LONGEST_SEQUENCE = 4000
"""Kernels of a step that are matched by their order."""
SURE = 0.05
MOST_NAMES = 3


class WorkChange(NamedTuple):
    """One piece of work on both sides. Times are summed durations of a step, medians over steps of means over
    ranks; None where that side does not have it."""

    table: Table
    work_class: str
    reference: str
    candidate: str
    operator: str
    shapes: str
    module: str
    matched_by: MATCHED
    reference_ms: float | None
    candidate_ms: float | None
    difference_ms: float
    reference_count: float
    candidate_count: float
    reference_range: tuple[float, float] | None
    """Fastest and slowest step."""
    candidate_range: tuple[float, float] | None
    certainty: str


class TraceChanges(NamedTuple):
    rows: list[WorkChange]
    """By table, what changed most first."""
    num_steps: tuple[int, int]
    notes: list[str]
    withheld: str = ""
    """Why there are no rows."""

    def of_table(self, table: Table) -> list[WorkChange]:
        return [row for row in self.rows if row.table == table]


class _Work(NamedTuple):
    keys: list[WorkKey]
    times: WorkTimes


_Side = dict[WorkKey, WorkTimes]


def trace_changes(reference: Sequence[Inventory], candidate: Sequence[Inventory]) -> TraceChanges:
    """Of the inventories of the ranks of two runs."""
    windows = [all(rank.is_whole_window for rank in side) for side in (reference, candidate)]
    if windows[0] != windows[1]:
        side = "reference" if windows[0] else "candidate"
        return TraceChanges(
            [], (0, 0), [], f"the {side} marks no steps: its times are of all that was traced"
        )
    r, c = _mean_of_ranks(reference), _mean_of_ranks(candidate)
    num_steps = _num_steps(reference), _num_steps(candidate)
    kernels = _matched(
        _of_kind(r, "kernel", "copy"),
        _of_kind(c, "kernel", "copy"),
        (reference[0].sequence, candidate[0].sequence),
    )
    rows = [
        *_class_rows(r, c),
        *(_row("kernel", *pair) for pair in kernels),
        *_operator_rows(r, c),
        *(_row("collective", *pair) for pair in _matched_collectives(r, c)),
    ]
    ranked = sorted(rows, key=lambda row: -abs(row.difference_ms))
    tables: tuple[Table, ...] = ("class", "kernel", "operator", "collective")
    return TraceChanges(
        [row for table in tables for row in ranked if row.table == table],
        num_steps,
        list(_notes(reference, candidate, num_steps, windows[0], kernels)),
    )


def _num_steps(ranks: Sequence[Inventory]) -> int:
    return min(rank.num_steps for rank in ranks)


def _mean_of_ranks(ranks: Sequence[Inventory]) -> _Side:
    """By step, over ranks: the first steps that all of them have."""
    num_steps = _num_steps(ranks)
    sums: dict[WorkKey, list[Floats]] = {}
    for rank in ranks:
        for key, times in rank.work.items():
            pair = sums.setdefault(key, [np.zeros(num_steps), np.zeros(num_steps)])
            pair[0] += times.ms[:num_steps] / len(ranks)
            pair[1] += times.launches[:num_steps] / len(ranks)
    return {key: WorkTimes(*pair) for key, pair in sums.items()}


def _of_kind(side: _Side, *kinds: str) -> _Side:
    return {key: times for key, times in side.items() if key.kind in kinds}


def _joined(side: Mapping[WorkKey, WorkTimes], keys: Iterable[WorkKey]) -> _Work | None:
    keys = list(keys)
    if not keys:
        return None
    ms, count = (np.sum([column[i] for column in map(side.__getitem__, keys)], axis=0) for i in (0, 1))
    return _Work(keys, WorkTimes(ms, count))


_Pair = tuple[_Work | None, _Work | None, MATCHED]
_Rule = tuple[MATCHED, Callable[[WorkKey], Hashable | None]]


def _matched(r: _Side, c: _Side, sequences: tuple[Sequence[WorkKey], Sequence[WorkKey]]) -> list[_Pair]:
    rules: list[_Rule] = [
        ("all", lambda key: key),
        (
            "operator and shapes",
            lambda key: (key.work_class, *key[3:6]) if key.operator and key.shapes else None,
        ),
        ("name", lambda key: key.name),
        ("operator", lambda key: (key.work_class, key.operator) if key.operator else None),
    ]
    left_r, left_c = dict(r), dict(c)
    pairs = [pair for rule in rules for pair in _take(left_r, left_c, *rule)]
    partner = _by_order(left_r, left_c, sequences)
    pairs += _take(left_r, left_c, "order", partner.get)
    return pairs + _alone(left_r, left_c, lambda key: key)


def _take(
    left_r: _Side, left_c: _Side, matched_by: MATCHED, signature: Callable[[WorkKey], Hashable | None]
) -> list[_Pair]:
    """Pairs of what has the same signature on both sides, which are then no longer left."""
    of_r, of_c = (_by_signature(side, signature) for side in (left_r, left_c))
    pairs: list[_Pair] = []
    for value in [value for value in of_r if value in of_c]:
        pairs.append((_joined(left_r, of_r[value]), _joined(left_c, of_c[value]), matched_by))
        for side, taken in ((left_r, of_r[value]), (left_c, of_c[value])):
            for key in taken:
                del side[key]
    return pairs


def _alone(left_r: _Side, left_c: _Side, signature: Callable[[WorkKey], Hashable]) -> list[_Pair]:
    """What is left on either side, with what has the same signature there."""
    of_r, of_c = (_by_signature(side, signature).values() for side in (left_r, left_c))
    return [
        *((_joined(left_r, keys), None, "one side only") for keys in of_r),
        *((None, _joined(left_c, keys), "one side only") for keys in of_c),
    ]


def _by_signature(
    side: _Side, signature: Callable[[WorkKey], Hashable | None]
) -> dict[Hashable, list[WorkKey]]:
    found: dict[Hashable, list[WorkKey]] = defaultdict(list)
    for key in side:
        if (value := signature(key)) is not None:
            found[value].append(key)
    return found


def _by_order(
    left_r: _Side, left_c: _Side, sequences: tuple[Sequence[WorkKey], Sequence[WorkKey]]
) -> dict[WorkKey, int]:
    """A number for what stands at the same places of a step, among kernels of a class: both sequences are
    aligned by class, then the partner that a kernel meets most often is its own."""
    first, second = (sequence[:LONGEST_SEQUENCE] for sequence in sequences)
    if not left_r or not left_c or not first or not second:
        return {}
    aligned = SequenceMatcher(
        None, [key.work_class for key in first], [key.work_class for key in second], autojunk=False
    )
    meetings: Counter[tuple[WorkKey, WorkKey]] = Counter()
    for block in aligned.get_matching_blocks():
        for offset in range(block.size):
            pair = first[block.a + offset], second[block.b + offset]
            if pair[0] in left_r and pair[1] in left_c:
                meetings[pair] += 1
    number: dict[WorkKey, int] = {}
    for i, ((r, c), _) in enumerate(meetings.most_common()):
        if r not in number and c not in number:
            number[r] = number[c] = i
    return number


def _matched_collectives(r: _Side, c: _Side) -> list[_Pair]:
    left = _of_kind(r, "collective"), _of_kind(c, "collective")
    rules: list[_Rule] = [
        ("all", lambda key: key),
        ("operator and shapes", lambda key: (key.name, key.shapes) if key.shapes else None),
        ("name", lambda key: key.name),
    ]
    return [pair for rule in rules for pair in _take(*left, *rule)] + _alone(*left, lambda key: key)


def _class_rows(r: _Side, c: _Side) -> list[WorkChange]:
    left_r, left_c = dict(r), dict(c)
    pairs = _take(left_r, left_c, "class", lambda key: key.work_class)
    pairs += _alone(left_r, left_c, lambda key: key.work_class)
    return [
        _row("class", *pair)._replace(operator="", shapes="", module="", reference=name, candidate=name)
        for pair in pairs
        for name in [_first(pair).work_class]
    ]


def _operator_rows(r: _Side, c: _Side) -> list[WorkChange]:
    """Operators of the same shapes together, in whatever module they ran: layers do the same work."""
    left_r, left_c = ({key: times for key, times in side.items() if key.operator} for side in (r, c))
    pairs = _take(left_r, left_c, "operator and shapes", lambda key: (key.operator, key.shapes))
    pairs += _take(left_r, left_c, "operator", lambda key: key.operator)
    pairs += _alone(left_r, left_c, lambda key: (key.operator, key.shapes))
    return [
        _row("operator", *pair)._replace(
            module=_listed(key.module for side in pair[:2] if side for key in side.keys),
            work_class=", ".join(
                dict.fromkeys(key.work_class for side in pair[:2] if side for key in side.keys)
            ),
            reference="" if pair[0] is None else _listed(key.operator for key in pair[0].keys),
            candidate="" if pair[1] is None else _listed(key.operator for key in pair[1].keys),
        )
        for pair in pairs
    ]


def _row(table: Table, r: _Work | None, c: _Work | None, matched_by: MATCHED) -> WorkChange:
    medians = [None if side is None else float(np.median(side.times.ms)) for side in (r, c)]
    ranges = [
        None if side is None else (float(side.times.ms.min()), float(side.times.ms.max())) for side in (r, c)
    ]
    counts = [0.0 if side is None else float(np.median(side.times.launches)) for side in (r, c)]
    texts = [_listed(kernel_name(key.name) for key in side.keys) if side else "" for side in (r, c)]
    shapes = [_listed(key.shapes for key in side.keys) if side else "" for side in (r, c)]
    key = _first((r, c, matched_by))
    same_shapes = not all((r, c)) or shapes[0] == shapes[1]
    return WorkChange(
        table=table,
        work_class=key.work_class,
        reference=texts[0],
        candidate=texts[1],
        operator=key.operator,
        shapes=(shapes[0] or shapes[1]) if same_shapes else f"{shapes[0]} -> {shapes[1]}",
        module=key.module,
        matched_by=matched_by,
        reference_ms=medians[0],
        candidate_ms=medians[1],
        difference_ms=(medians[1] or 0.0) - (medians[0] or 0.0),
        reference_count=counts[0],
        candidate_count=counts[1],
        reference_range=ranges[0],
        candidate_range=ranges[1],
        certainty=certainty(*(None if side is None else side.times.ms for side in (r, c))),
    )


def _first(pair: _Pair) -> WorkKey:
    work = pair[0] or pair[1]
    assert work is not None
    return work.keys[0]


def _listed(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(filter(None, names)))
    more = f" and {len(distinct) - MOST_NAMES} more" if len(distinct) > MOST_NAMES else ""
    return " | ".join(distinct[:MOST_NAMES]) + more


def certainty(reference: Floats | None, candidate: Floats | None) -> str:
    """What so few steps tell of a difference: whether all steps of one side are beyond all of the other, and
    how often that happens to steps that do not differ, 2 in (n + m over n)."""
    if reference is None or candidate is None:
        return "on one side only"
    n, m = len(reference), len(candidate)
    if min(n, m) < 2:
        return "one step: its spread is not known"
    if reference.max() < candidate.min() or candidate.max() < reference.min():
        chance = 2 / comb(n + m, n)
        sure = "apart" if chance <= SURE else "apart, too few steps to be sure"
        return f"{sure} (by chance 1 in {comb(n + m, n) / 2:.0f})"
    return "within the spread of steps"


def _notes(
    reference: Sequence[Inventory],
    candidate: Sequence[Inventory],
    num_steps: tuple[int, int],
    is_window: bool,
    kernels: Sequence[_Pair],
) -> Iterable[str]:
    num_rows = len(kernels)
    if is_window:
        yield "neither trace marks steps: times are of all that was traced, and their spread is not known"
    elif min(num_steps) < 4 and 2 / comb(sum(num_steps), num_steps[0]) > SURE:
        yield (
            f"{num_steps[0]} and {num_steps[1]} steps: no difference of theirs is beyond chance; their size"
            " is what was measured in these steps, no more"
        )
    else:
        by_chance = 2 / comb(sum(num_steps), num_steps[0]) * num_rows
        yield (
            f"of {num_rows} rows about {by_chance:.1g} are apart by chance, and steps of one run are more"
            " alike than steps of two: an order in which to look, no verdict"
        )
    yield from _unmatched(kernels)
    sides = {"reference": reference, "candidate": candidate}
    without = [name for name, ranks in sides.items() if not any(rank.has_operators for rank in ranks)]
    if without:
        yield (
            f"no operators in the trace of the {' and the '.join(without)}: kernels are matched by name and"
            " order"
        )
    if len(reference) != len(candidate):
        yield f"{len(reference)} and {len(candidate)} ranks: times are means over ranks"
    yield f"times are summed durations, which may overlap; {COMMUNICATION} holds the waiting for other ranks"


def _unmatched(kernels: Sequence[_Pair]) -> Iterable[str]:
    """How much of the kernels' time has no partner, or one that only stands at the same place: of it nothing
    is said."""
    total, alone, guessed = ([0.0, 0.0] for _ in range(3))
    for *sides, matched_by in kernels:
        for i, work in enumerate(sides):
            if work is not None:
                ms = float(np.median(work.times.ms))
                total[i] += ms
                alone[i] += ms if matched_by == "one side only" else 0.0
                guessed[i] += ms if matched_by == "order" else 0.0
    for amounts, words in (
        (alone, "have no partner"),
        (guessed, "are matched by their place in the step alone"),
    ):
        if any(amounts):
            yield (
                f"kernels of {number(amounts[0])} of {number(total[0])} and {number(amounts[1])} of"
                f" {number(total[1])} ms {words}"
            )
