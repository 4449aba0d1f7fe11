"""Wrong numbers: compares fingerprints of all ranks with each other and with what a collective computes.

A fingerprint is [square of the norm, signed sums...] (aorta/check/fingerprints.py). Differences of less than
LEAST of the norm are not told from rounding.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

LEAST = 2.0**-5
SAME = 1e-4
"""Difference, as a share of the norm, up to which two tensors count as the same bits summed in another
order."""
SMALL_NORM = 1e-30

Numbers = list[float]
"""A fingerprint; empty where the tensor has values that are not finite."""
Moment = Literal["before", "after", "gradient"]


class Call(msgspec.Struct, kw_only=True):
    """A collective of one rank in a checked step, as fingerprints. Large tensors of several ranks' parts have
    one for each part."""

    step: int
    group: str
    """Ranks of the group."""
    number: int
    """Place among the group's collectives in the step."""
    place: int
    """Place among all that was fingerprinted in the step."""
    op: str
    reduction: str = ""
    name: str
    """Where it was issued, in words: at a line, in a function."""
    epsilon: float = 0.0
    """Relative rounding of the type."""
    inputs: list[Numbers] = []
    outputs: list[Numbers] = []
    """Empty where nobody was seen to wait for them."""
    root: int | None = None
    """Place in the group of the rank that sends, for a broadcast."""


class Parameter(msgspec.Struct, kw_only=True):
    """A parameter, or its gradient, of one rank around an optimizer's step."""

    step: int
    place: int
    name: str
    moment: Moment
    """before or after the optimizer's step; gradient: before it."""
    numbers: Numbers


class Difference(msgspec.Struct, kw_only=True):
    """A tensor that is not what it must be."""

    rank: int
    step: int
    place: float
    """Place of the call or parameter in its step; what comes out of a call is half a place later."""
    what: Literal["nan", "ranks", "sum", "stale"]
    """nan: values that are not finite; ranks: other ranks have others; sum: not what the collective makes
    of its inputs; stale: the same bits as in the step before, while other ranks' changed, and its own do
    in other steps."""
    name: str
    detail: str = ""


class Numbered(msgspec.Struct, kw_only=True):
    """Fingerprints of one rank."""

    rank: int
    calls: list[Call] = []
    parameters: list[Parameter] = []


def differences(ranks: Sequence[Numbered]) -> list[Difference]:
    """All that differs, in the order in which it appeared; of one step and rank the first of each kind."""
    found = [*_not_finite(ranks), *_of_collectives(ranks), *_of_parameters(ranks)]
    first: dict[tuple[int, int, str], Difference] = {}
    for difference in sorted(found, key=lambda d: (d.step, d.place, d.rank)):
        first.setdefault((difference.step, difference.rank, difference.what), difference)
    return list(first.values())


def _not_finite(ranks: Sequence[Numbered]) -> Iterator[Difference]:
    for rank in ranks:
        for call in rank.calls:
            for word, parts in (("goes in", call.inputs), ("comes out", call.outputs)):
                if not all(parts):
                    detail = f"a value that is not finite {word}"
                    difference = _difference(rank.rank, call, "nan", f"{call.op} {call.name}", detail)
                    difference.place += 0.5 * (parts is call.outputs)
                    yield difference
                    break
        for parameter in rank.parameters:
            if not parameter.numbers:
                yield _difference(
                    rank.rank, parameter, "nan", parameter.name, f"{_word(parameter)} is not finite"
                )


def _difference(rank: int, of: Call | Parameter, what: str, name: str, detail: str) -> Difference:
    return Difference(rank=rank, step=of.step, place=of.place, what=what, name=name, detail=detail)  # type: ignore[arg-type]


# -- collectives --------------------------------------------------------------------------------------


def _of_collectives(ranks: Sequence[Numbered]) -> Iterator[Difference]:
    by_call: dict[tuple[int, str, int], dict[int, Call]] = {}
    for rank in ranks:
        for call in rank.calls:
            by_call.setdefault((call.step, call.group, call.number), {})[rank.rank] = call
    for (_, group, _), calls in by_call.items():
        members = [int(member) for member in group.split(",")]
        ops = {call.op for call in calls.values()}
        if set(calls) == set(members) and len(ops) == 1:
            ordered = [calls[member] for member in members]
            yield from _of_call(members, ordered)
    yield from _stale(by_call)


def _of_call(members: Sequence[int], calls: Sequence[Call]) -> Iterator[Difference]:
    num, op = len(calls), calls[0].op
    whole = all(call.inputs and all((*call.inputs, *call.outputs)) for call in calls)
    if not whole:
        return
    expected: list[list[Numbers] | None]
    scale = 1.0 / num if calls[0].reduction == "avg" else 1.0
    summed = calls[0].reduction in ("sum", "avg")
    if op == "all_reduce" and summed:
        total = _sum([call.inputs[0] for call in calls], scale)
        expected = [[total]] * num
    elif op == "reduce_scatter" and summed and all(len(call.inputs) == num for call in calls):
        expected = [[_sum([call.inputs[part] for call in calls], scale)] for part in range(num)]
    elif op == "all_gather" and all(len(call.outputs) in (0, num) for call in calls):
        expected = [[call.inputs[0] for call in calls]] * num
    elif op == "broadcast" and calls[0].root is not None:
        expected = [[calls[calls[0].root].inputs[0]]] * num
    else:
        return
    noise = math.sqrt(num) * calls[0].epsilon if summed else 0.0
    size = sum(_norm(call.inputs[0]) for call in calls) * scale
    for member, call, parts in zip(members, calls, expected, strict=True):
        for part, (output, right) in enumerate(zip(call.outputs, parts or (), strict=False)):
            off = _distance(output, right)
            bound = LEAST * max(_norm(output), _rms(right), SMALL_NORM) + 4 * noise * size
            if off > bound:
                of_part = f", part of rank {members[part]}" if len(call.outputs) > 1 else ""
                detail = f"what comes out is off by {off:.3g}{of_part}; its norm is {_norm(output):.3g}"
                yield _difference(member, call, "sum", f"{op} {call.name}", detail)
                break


def _stale(by_call: Mapping[tuple[int, str, int], Mapping[int, Call]]) -> Iterator[Difference]:
    """What is reduced and has not changed since the step before, where most other ranks' has, and this rank's
    did in another step: what never changes is meant so. What is gathered may rest, as a frozen layer's shard.
    """
    changes = {
        key: {rank: _is_changed(earlier[rank], call) for rank, call in calls.items() if rank in earlier}
        for key, calls in by_call.items()
        if (earlier := by_call.get((key[0] - 1, *key[1:]))) and next(iter(calls.values())).reduction
    }
    changing = {
        (*key[1:], rank) for key, ranks in changes.items() for rank, changed in ranks.items() if changed
    }
    for key, ranks in changes.items():
        if sum(ranks.values()) * 2 < len(key[1].split(",")):
            continue
        for rank, is_changed in ranks.items():
            call = by_call[key][rank]
            if (
                not is_changed
                and (*key[1:], rank) in changing
                and any(_norm(part) > 0 for part in call.inputs)
            ):
                detail = "what goes in has the bits of the step before, other ranks' has not"
                yield _difference(rank, call, "stale", f"{call.op} {call.name}", detail)


def _is_changed(earlier: Call, call: Call) -> bool:
    return not all(call.inputs) or call.inputs != earlier.inputs or call.op != earlier.op


# -- parameters ---------------------------------------------------------------------------------------


def _of_parameters(ranks: Sequence[Numbered]) -> Iterator[Difference]:
    if len(ranks) < 2:
        return
    by_key: dict[tuple[int, str, str], dict[int, Parameter]] = {}
    for rank in ranks:
        for parameter in rank.parameters:
            by_key.setdefault((parameter.step, parameter.name, parameter.moment), {})[rank.rank] = parameter
    replicated = set[str]()
    """Names of parameters whose gradients, not zero, were the same on all ranks in some checked step."""
    split: list[dict[int, Parameter]] = []
    for (_, name, moment), of_rank in by_key.items():
        if len(of_rank) < len(ranks) or not all(p.numbers for p in of_rank.values()):
            continue
        if len(_camps(of_rank)) == 1:
            if moment == "gradient" and all(_norm(p.numbers) > SMALL_NORM for p in of_rank.values()):
                replicated.add(name)
        else:
            split.append(of_rank)
    moved = _moved(ranks)
    for of_rank in split:
        one = next(iter(of_rank.values()))
        if one.name in replicated:  # values alone may agree by chance, as those of two stages do at first
            for member in _odd_ranks(of_rank, moved):
                others = [rank for rank in of_rank if rank != member]
                detail = f"{_word(one)} differs from that of rank{'s' * (len(others) > 1)} {_listed(others)}"
                yield _difference(member, of_rank[member], "ranks", one.name, detail)


def _camps(of_rank: dict[int, Parameter]) -> list[list[int]]:
    """Ranks with the same numbers, the largest camp first."""
    camps: list[list[int]] = []
    for rank, parameter in of_rank.items():
        for camp in camps:
            if _is_same(parameter.numbers, of_rank[camp[0]].numbers):
                camp.append(rank)
                break
        else:
            camps.append([rank])
    return sorted(camps, key=len, reverse=True)


def _odd_ranks(of_rank: dict[int, Parameter], moved: set[tuple[int, int, str]]) -> list[int]:
    """Ranks that have other numbers than most; of two camps of one size, those that changed by themselves."""
    camps = _camps(of_rank)
    if len(camps[0]) > len(camps[1]):
        return [rank for camp in camps[1:] for rank in camp]
    by_itself = [r for r, p in of_rank.items() if (r, p.step, p.name) in moved]
    return by_itself or [rank for camp in camps[1:] for rank in camp]


def _moved(ranks: Sequence[Numbered]) -> set[tuple[int, int, str]]:
    """(rank, step, name) of parameters that changed between two optimizer steps, from that step on."""
    found = set[tuple[int, int, str]]()
    for rank in ranks:
        after: dict[str, Parameter] = {}
        is_moved: set[str] = set()
        for parameter in rank.parameters:
            if parameter.moment == "after":
                after[parameter.name] = parameter
            elif parameter.moment == "before":
                last = after.get(parameter.name)
                is_next = last is not None and last.step == parameter.step - 1
                if is_next and not _is_same(after[parameter.name].numbers, parameter.numbers):
                    is_moved.add(parameter.name)
            if parameter.name in is_moved:
                found.add((rank.rank, parameter.step, parameter.name))
    return found


def _word(parameter: Parameter) -> str:
    return {"before": "its value", "after": "its value after the update", "gradient": "its gradient"}[
        parameter.moment
    ]


# -- arithmetic ---------------------------------------------------------------------------------------


def _norm(numbers: Numbers) -> float:
    return math.sqrt(max(numbers[0], 0.0))


def _rms(numbers: Numbers) -> float:
    signed = numbers[1:]
    return math.sqrt(sum(value * value for value in signed) / len(signed))


def _sum(parts: Sequence[Numbers], scale: float) -> Numbers:
    return [scale * sum(values) for values in zip(*parts, strict=True)]


def _distance(a: Numbers, b: Numbers) -> float:
    """Norm of the difference of two tensors, to about a third."""
    return _rms([0.0, *(x - y for x, y in zip(a[1:], b[1:], strict=True))])


def _is_same(a: Numbers, b: Numbers) -> bool:
    if not (a and b):
        return not a and not b
    return _distance(a, b) <= SAME * max(_norm(a), _norm(b), SMALL_NORM)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
