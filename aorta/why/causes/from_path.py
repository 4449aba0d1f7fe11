"""Causes of a traced step: the parts of its critical path, and what the step would be without each."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from aorta.account.numbers import percent, quantity
from aorta.errors import ReplayError
from aorta.timeline.statistics import MIN_STEPS, estimate, side
from aorta.why.causes.cause import Cause, CauseKind
from aorta.why.causes.rules import CauseRule, rules
from aorta.why.replay.changes import Change, parse_change
from aorta.why.replay.graph import NodeKind, StepGraph, TraceGraph
from aorta.why.replay.path import PathPart, critical_path
from aorta.why.replay.run import Replayed, replay
from aorta.why.replay.whatif import predict, settled

LEAST_SHARE = 0.03
"""Of the step, from which on a stretch of the critical path is a cause."""
MOST_SHOWN = 5
MOST_NAMED = 3
WITHIN_DEVICE = "device"
WITHIN_DEVICE_NAME = re.compile(r"DtoD|Device -> Device|Memset|CopyDeviceToDevice|FillBuffer", re.IGNORECASE)
LOST: dict[str, CauseKind] = {
    "transfer": "transfer",
    "late_rank": "late_rank",
    "launch_bound": "launch_bound",
    "synchronisation": "synchronisation",
    "data_loading": "data_loading",
    "contention": "contention",
    "copy": "copy",
    "bubble": "bubble",
}
"""Kinds of parts that are lost time; compute is what a step is for."""


@dataclass(slots=True)
class _Stretch:
    """Everything on the path with one cause."""

    kind: CauseKind
    key: str
    ms: list[float]
    """By step."""
    parts: list[PathPart] = field(default_factory=list)


def causes_of_steps(steps: Sequence[StepGraph], path: str = "TRACES") -> list[Cause]:
    """At most five causes, the largest first. path: what the commands of the causes are given."""
    steady = settled(steps)
    replayed = replay(steady[0])
    stretches = _stretches(replayed, steady)
    step_ms = float(np.median([replayed.of_step(step).slowest_ms for step in steady]))
    if not step_ms > 0:
        return []
    stack = stack_of(steady[0].trace)
    causes = [
        _cause(stretch, steady, step_ms, stack, path)
        for stretch in stretches
        if float(np.median(stretch.ms)) >= LEAST_SHARE * step_ms
    ]
    return sorted(causes, key=lambda cause: -cause.ms)[:MOST_SHOWN]


def _stretches(replayed: Replayed, steps: Sequence[StepGraph]) -> list[_Stretch]:
    stretches: dict[tuple[str, str], _Stretch] = {}
    for place, step in enumerate(steps):
        for part in critical_path(replayed.of_step(step)):
            if part.kind not in LOST:
                continue
            key = _key(part)
            stretch = stretches.setdefault(
                (part.kind, key), _Stretch(LOST[part.kind], key, [0.0] * len(steps))
            )
            stretch.ms[place] += part.ms
            stretch.parts.append(part)
    return list(stretches.values())


def _key(part: PathPart) -> str:
    """What is one cause: an operation, a rank, a call; everything of the other kinds."""
    if part.kind in ("transfer", "bubble"):
        return part.subject.partition(" (")[0]
    if part.kind == "copy":
        return WITHIN_DEVICE if WITHIN_DEVICE_NAME.search(part.subject) else ""
    if part.kind == "late_rank":
        return part.subject
    if part.kind == "synchronisation":
        return _operator(part.subject)
    return ""


def _cause(
    stretch: _Stretch, steps: Sequence[StepGraph], step_ms: float, stack: frozenset[str], path: str
) -> Cause:
    ms = float(np.median(stretch.ms))
    estimated = estimate(np.array([stretch.ms]), "median")
    interval = None if estimated is None else side([estimated])[1]
    remedy = _remedy(stretch)
    bound_ms, sentences = _bound(remedy, steps, step_ms)
    rule = rules().get(stretch.kind)
    ranks = {part.rank for part in stretch.parts}
    subject_ranks = f"rank {next(iter(ranks))}" if len(ranks) == 1 and min(ranks) >= 0 else "all ranks"
    longest = max(stretch.parts, key=lambda part: part.ms)
    owner = next(
        (i for i, step in enumerate(steps) if _window(step)[0] <= longest.start_ns < _window(step)[1]), 0
    )
    command = f"aorta why {path}" + (f" --if '{remedy}'" if remedy else "")
    return Cause(
        kind=stretch.kind,
        subject=_subject(stretch, subject_ranks),
        ms=ms,
        interval_ms=None if interval is None else (max(interval[0], 0.0), interval[1]),
        why_no_interval=""
        if interval
        else f"too few traced steps for an interval: {len(steps)} of {MIN_STEPS}",
        bound_ms=bound_ms,
        share=ms / step_ms,
        evidence=tuple([*_evidence(stretch, step_ms, len(steps)), *sentences]),
        change=_change(rule, stack, stretch, subject_ranks),
        check=command,
        source="trace",
        rank=longest.rank if longest.rank >= 0 else None,
        global_step=steps[owner].number,
        at_ms=_place(steps[owner], longest),
    )


def _window(step: StepGraph) -> tuple[float, float]:
    nodes = step.trace.nodes
    return (
        min(nodes.start_ns[end.first // 2] for end in step.ends),
        max(nodes.start_ns[end.last // 2] for end in step.ends),
    )


def _place(step: StepGraph, part: PathPart) -> tuple[float, float] | None:
    end = next((end for end in step.ends if end.rank == part.rank), None)
    if end is None:
        return None
    begin = step.trace.nodes.start_ns[end.first // 2]
    return (part.start_ns - begin) / 1e6, (part.end_ns - begin) / 1e6


def _subject(stretch: _Stretch, ranks: str) -> str:
    match stretch.kind:
        case "transfer":
            return f"exposed transfer: {stretch.key}"
        case "late_rank":
            return f"waiting for {stretch.key}"
        case "launch_bound":
            return f"slow kernel launches on {ranks}: the device runs dry"
        case "synchronisation":
            return f"the host waits for the device in {stretch.key}"
        case "data_loading":
            return f"data loading on {ranks}"
        case "contention":
            return "kernels slowed down or held up by concurrent communication"
        case "copy":
            return (
                f"copies within the device on {ranks}"
                if stretch.key == WITHIN_DEVICE
                else f"copies on {ranks}"
            )
        case _:
            return f"waiting for the neighbouring pipeline stage: {stretch.key}"


def _evidence(stretch: _Stretch, step_ms: float, num_steps: int) -> list[str]:
    ms = float(np.median(stretch.ms))
    steps = f"{num_steps} traced step{'s' if num_steps > 1 else ''}"
    sentences = [
        f"{quantity(ms, 'ms')} of the critical path of {quantity(step_ms, 'ms')} ({percent(ms / step_ms)},"
        f" median of {steps})"
    ]
    details: dict[str, float] = {}
    for part in stretch.parts:
        detail = part.evidence if stretch.kind == "late_rank" else part.subject
        details[detail] = details.get(detail, 0.0) + part.ms / num_steps
    named = sorted(details.items(), key=lambda row: -row[1])[:MOST_NAMED]
    sentences.append("; ".join(f"{text}: {quantity(ms, 'ms')}" for text, ms in named))
    longest = max(stretch.parts, key=lambda part: part.ms)
    if longest.evidence and stretch.kind != "late_rank":
        sentences.append(
            f"longest stretch, {quantity(longest.ms, 'ms')} on rank {longest.rank}: {longest.evidence}"
        )
    return sentences


def _operator(subject: str) -> str:
    """aten::item of 'cudaStreamSynchronize (aten::item in forward)'; the call where no operator is around."""
    call, _, program = subject.partition(" (")
    operator = program.removesuffix(")").partition(" in ")[0]
    return call if operator in ("", "between operators") else operator


def _remedy(stretch: _Stretch) -> str | None:
    """The what-if that takes the cause away, in the words of the command line."""
    match stretch.kind:
        case "transfer":
            return f"{stretch.key} x0"
        case "late_rank":
            return f"{stretch.key} on time"
        case "launch_bound":
            return "graphs"
        case "synchronisation":
            return f"no sync {stretch.key}"
        case "data_loading":
            return "no loader delay"
        case "contention":
            return "no contention"
        case _:
            return None


def _bound(remedy: str | None, steps: Sequence[StepGraph], step_ms: float) -> tuple[float | None, list[str]]:
    """The step without the cause, and a sentence on it."""
    if remedy is None:
        return None, []
    try:
        changes: list[Change] = [parse_change(remedy)]
        predicted = predict(steps, changes, has_contention=False)
    except ReplayError:
        return None, []
    bound = min(predicted.predicted_ms, step_ms)
    first = predicted.next_parts[0] if predicted.next_parts else None
    next_text = (
        "; the host needs that long for a step, however fast the device is"
        if predicted.is_host_bound
        else ""
        if first is None
        else f"; the longest part is then {first.kind}: {first.subject}, {quantity(first.ms, 'ms')}"
    )
    return bound, [f"a replay of the step without it takes {quantity(bound, 'ms')}{next_text}"]


def _change(rule: CauseRule | None, stack: frozenset[str], stretch: _Stretch, ranks: str) -> str:
    facts = {"who": stretch.key or ranks, "what": stretch.key, "op": stretch.key, "path": ""}
    if rule is None:
        return ""
    for change in rule.change:
        if set(change.stack) <= stack | {"any"} and change.op in (None, stretch.key):
            try:
                return change.set.format_map(facts)
            except KeyError:
                return change.set
    return ""


def stack_of(graph: TraceGraph) -> frozenset[str]:
    """The libraries that the traces show, as the rules name them."""
    names = {"any"}
    nodes = graph.nodes
    programs = {name for name in {*nodes.program, *nodes.unit} if name}
    if any("FSDP::" in name for name in programs):
        names.add("fsdp2")
    if any("DistributedDataParallel" in name for name in programs):
        names.add("ddp")
    if any("CompiledFunction" in name or "Torch-Compiled" in name for name in programs):
        names.add("compile")
    if any("DataLoader" in name for name in programs):
        names.add("dataloader")
    ops = {collective.op for collective in graph.collectives}
    if "all_to_all" in ops:
        names.add("moe")
    calls = {nodes.name[node] for node, kind in enumerate(nodes.kind) if kind == NodeKind.CALL}
    names.add("rccl" if any(name.startswith("hip") for name in calls) else "nccl")
    return frozenset(names)
