"""What held memory on the rank that had too little of it, in words: who, what grew, which rank differs."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from aorta.account.numbers import byte_text, percent
from aorta.records.memory import HeldKind, HeldMemory, MemoryShortage
from aorta.records.schema import StepRecord

NOTED = 0.02
"""Share of what is held, from which on it is named."""
LARGE = 0.05
"""Share of the limit from which on growth, a difference of ranks, or memory in pieces is said."""
FIRST_STEPS = 3
"""Left out of growth: the allocator, the optimizer and the libraries settle."""
MOST_MODULES = 3
MOST_HELD = 5
WORDS: dict[HeldKind, str] = {
    "activations": "activations for the backward pass",
    "kept graphs": "graphs of earlier results",
    "kept tensors": "tensors",
}
"""Of kinds that are called something else."""
CHANGES: dict[str, str] = {
    "pieces": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and give batches few different shapes",
    "pieces, expandable": "give batches few different shapes: segments are expandable already",
    "activations": "a smaller micro batch, or torch.utils.checkpoint around {modules}",
    "kept graphs": "keep loss.detach() or loss.item() instead of the loss, and detach what goes on to the"
    " next step: {holder} has graphs",
    "evaluation": "evaluate under torch.no_grad(): {holder} has graphs",
    "kept tensors": "let go of what {holder} keeps, or keep it on the host (.detach().cpu())",
    "kept tensors, host": "let go of what {holder} keeps, or keep numbers of it (.item(), a mean), or a file",
    "tensors": "let go of {holder} before the next step, or make it smaller",
    "optimizer state": "shard the state (fully_shard, ZeroRedundancyOptimizer), or hold less of it",
    "parameters": "shard the model (fully_shard), or hold it in bfloat16",
    "gradients": "shard the model (fully_shard), or zero_grad(set_to_none=True) before the forward pass",
    "buffers": "make the buffers smaller, or hold them on the host",
    "grows": "find out why batches of later steps are larger: bound the length of a sequence, or sort by it",
    "rank": "give ranks equal work: rank {rank} has larger batches, a larger stage or more experts",
}


class _Group(NamedTuple):
    kind: HeldKind
    holder: str
    bytes: int
    num_blocks: int
    modules: list[str]
    """That have the most of it, the most first."""


class Peaks(NamedTuple):
    """Memory of a rank by step, of the steps that were recorded on a device."""

    steps: list[int]
    ends: list[int]
    """Bytes at the end of a step's body."""
    tops: list[int]
    """The most that was seen in the step."""


Records = Callable[[int], Iterable[StepRecord]]


def shortage_lines(shortages: dict[int, MemoryShortage], records: Records, ranks: Iterable[int]) -> list[str]:
    """Nothing where no rank was short of memory. records: of a rank."""
    if not shortages:
        return []
    dead = [rank for rank, one in shortages.items() if one.why == "out of memory"]
    rank = max(dead or shortages, key=lambda rank: shortages[rank].allocated_bytes or 0)
    shortage = shortages[rank]
    peaks = peaks_of(records(rank))
    groups = grouped(shortage.held)
    lines = [_what(rank, shortage, [other for other in dead if other != rank])]
    lines += _held(shortage, groups)
    grew, differs = _growth(shortage, peaks), _difference(rank, shortage, peaks, records, ranks)
    lines += [line for line in (grew, differs) if line]
    change = _change(shortage, groups, rank, bool(grew), bool(differs))
    return [*lines, f"change: {change}"] if change else lines


def peaks_of(records: Iterable[StepRecord]) -> Peaks:
    found = Peaks([], [], [])
    for record in records:
        if (memory := record.memory) is not None and record.is_recorded:
            phases = (memory.forward_bytes, memory.backward_bytes, memory.optimizer_bytes)
            found.steps.append(record.global_step)
            found.ends.append(memory.allocated_bytes)
            found.tops.append(max(one for one in (*phases, memory.allocated_bytes) if one is not None))
    return found


def grouped(held: Iterable[HeldMemory]) -> list[_Group]:
    """By kind and holder, the most first."""
    parts: dict[tuple[HeldKind, str], list[HeldMemory]] = {}
    for one in held:
        holder = (
            one.holder if one.kind in ("kept graphs", "kept tensors", "tensors", "optimizer state") else ""
        )
        parts.setdefault((one.kind, holder), []).append(one)
    groups = []
    for (kind, holder), rows in parts.items():
        by_module: dict[str, int] = {}
        for row in rows:
            by_module[row.module] = by_module.get(row.module, 0) + row.bytes
        modules = sorted((name for name in by_module if name), key=lambda name: -by_module[name])
        size, num = sum(row.bytes for row in rows), sum(row.num_blocks for row in rows)
        groups.append(_Group(kind, holder, size, num, modules[:MOST_MODULES]))
    return sorted(groups, key=lambda group: -group.bytes)


def _what(rank: int, shortage: MemoryShortage, others: list[int]) -> str:
    step = "" if shortage.global_step is None else f" in step {shortage.global_step}"
    if shortage.why == "near the limit":
        return f"near the limit of memory on rank {rank}{step}: {_used(shortage)}"
    also = f" (also on rank {', '.join(map(str, others[:MOST_HELD]))})" if others else ""
    if shortage.phase == "forward" and not shortage.module:  # it may be the program's own code
        phase = "before the backward pass"
    else:
        phase = "" if shortage.phase in ("", "rest") else f"in {_PHASES.get(shortage.phase, shortage.phase)}"
    where = [
        phase,
        f"at {shortage.place}" if shortage.place else "",
        f"module {shortage.module}" if shortage.module else "",
    ]
    asked = "" if shortage.asked_bytes is None else f"{byte_text(shortage.asked_bytes)} asked for, "
    place = "".join(f", {part}" for part in where if part)
    return f"out of memory on rank {rank}{also}{step}{place}: {asked}{_used(shortage)}"


_PHASES = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "data": "data loading",
    "checkpoint": "a checkpoint",
    "evaluation": "an evaluation",
    "communication": "a collective",
}


def _used(shortage: MemoryShortage) -> str:
    device = "the host" if shortage.device == "cpu" else shortage.device
    if shortage.allocated_bytes is None:
        return f"tensors on {device} hold {byte_text(sum(row.bytes for row in shortage.held))}"
    of_limit = "" if shortage.limit_bytes is None else f" of {byte_text(shortage.limit_bytes)}"
    return f"{byte_text(shortage.allocated_bytes)}{of_limit} allocated on {device}"


def _held(shortage: MemoryShortage, groups: list[_Group]) -> Iterator[str]:
    found = sum(group.bytes for group in groups)
    total = max(shortage.allocated_bytes or 0, found)
    named = [group for group in groups if group.bytes >= NOTED * total][:MOST_HELD]
    parts = [f"{byte_text(group.bytes)} ({percent(group.bytes / total)}) {_named(group)}" for group in named]
    if total - found >= LARGE * total:
        parts.append(f"{byte_text(total - found)} of work under way and of C++ alone")
    if _has_pieces(shortage):
        parts.append(f"besides {byte_text(shortage.unused_bytes)} reserved in pieces that are too small")
    if parts:
        yield f"held: {'; '.join(parts)}" + (
            "" if shortage.is_whole else " (not all was looked at: at least)"
        )


def _named(group: _Group) -> str:
    words = WORDS.get(group.kind, group.kind)
    if group.holder:
        verb = "of" if group.kind == "optimizer state" else "in"
        count = f"{group.num_blocks} " if group.kind == "kept tensors" else ""
        words = f"{count}{words} {verb} {group.holder}"
    of_modules = f" of {', '.join(group.modules)}" if group.modules else ""
    return f"{words}{of_modules}" if not group.holder else f"{words}{of_modules and ',' + of_modules}"


def _has_pieces(shortage: MemoryShortage) -> bool:
    """True where the allocator has what was asked for, though not in one piece."""
    unused, asked, limit = shortage.unused_bytes, shortage.asked_bytes, shortage.limit_bytes
    if unused is None or asked is None or limit is None:
        return False
    return unused >= asked and unused >= LARGE * limit


def cause_of(shortage: MemoryShortage, groups: list[_Group], is_like_before: bool) -> str:
    """Kind of what holds most, or 'pieces'. is_like_before: memory did not grow, and no rank has more than
    others. Then pieces alone are in the way; else what grew would soon need them too."""
    most = largest(shortage, groups)
    if _has_pieces(shortage) and (
        is_like_before or most is None or (shortage.unused_bytes or 0) > most.bytes
    ):
        return "pieces"
    return "" if most is None else most.kind


def _growth(shortage: MemoryShortage, peaks: Peaks) -> str:
    """Over the recorded steps, or else from the last of them to the step that died; '' where nothing grew."""
    kept = [place for place, step in enumerate(peaks.steps) if step >= peaks.steps[0] + FIRST_STEPS]
    limit = shortage.limit_bytes or shortage.allocated_bytes
    if len(kept) < 2 or not limit:
        return ""
    first, last = kept[0], kept[-1]
    num = peaks.steps[last] - peaks.steps[first]
    for name, values in (("what is left at the end of a step", peaks.ends), ("the forward pass", peaks.tops)):
        grown = values[last] - values[first]
        if grown >= LARGE * limit:
            return (
                f"grew: {name} by {byte_text(grown / num)} a step, from {byte_text(values[first])} in step"
                f" {peaks.steps[first]} to {byte_text(values[last])} in step {peaks.steps[last]}"
            )
    most = max(peaks.tops[place] for place in kept)
    if (shortage.allocated_bytes or 0) - most >= LARGE * limit:
        return (
            f"grew: {byte_text(shortage.allocated_bytes)} were in use, and {byte_text(most)} at most in steps"
            f" {peaks.steps[first]} to {peaks.steps[last]}, of those that were recorded"
        )
    return ""


def _difference(
    rank: int, shortage: MemoryShortage, peaks: Peaks, records: Records, ranks: Iterable[int]
) -> str:
    """Against the rank that has the most of the others, in the last step that both recorded."""
    limit = shortage.limit_bytes or shortage.allocated_bytes
    tops = dict(zip(peaks.steps, peaks.tops, strict=True))
    most: tuple[int, int, int] | None = None
    for other in [one for one in ranks if one != rank][:MOST_COMPARED]:
        found = peaks_of(records(other))
        common = [place for place, step in enumerate(found.steps) if step in tops]
        if common and (most is None or found.tops[common[-1]] > most[0]):
            most = found.tops[common[-1]], found.steps[common[-1]], other
    if most is None or not limit:
        return ""
    size, step, other = most
    if tops[step] - size < DIFFERENT * limit:
        return ""
    return (
        f"differs: rank {rank} had {byte_text(tops[step])} in step {step}, rank {other}, which has the most"
        f" of the others, {byte_text(size)}"
    )


MOST_COMPARED = 8
DIFFERENT = 0.1
"""Share of the limit by which a rank has more than the others."""


def largest(shortage: MemoryShortage, groups: list[_Group]) -> _Group | None:
    """What holds most; what was asked for, where a module's one result is more than that."""
    asked = shortage.asked_bytes or 0
    if shortage.module and (not groups or asked >= groups[0].bytes):
        return _Group("activations", "", asked, 1, [shortage.module])
    return groups[0] if groups else None


def _change(shortage: MemoryShortage, groups: list[_Group], rank: int, grew: bool, differs: bool) -> str:
    cause, group = cause_of(shortage, groups, not grew and not differs), largest(shortage, groups)
    if cause == "pieces":
        return CHANGES["pieces, expandable" if shortage.expands_segments else "pieces"]
    if group is None:
        return ""
    if differs and not cause.startswith("kept"):
        cause = "rank"
    elif cause == "kept graphs" and shortage.phase == "evaluation":
        cause = "evaluation"
    elif grew and cause == "activations":
        cause = "grows"
    elif cause == "kept tensors" and shortage.device == "cpu":
        cause = "kept tensors, host"
    holder = group.holder or "the program"
    modules = " and ".join(group.modules[:2]) or "its layers"
    return CHANGES[cause].format(rank=rank, modules=modules, holder=holder)
