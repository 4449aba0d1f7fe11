"""Changes of work on the device: classes of kernels, contention, the batch.

Each function edits a draft; its form says how a user writes the change.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial

from aorta.errors import ReplayError, did_you_mean
from aorta.records.schema import KERNEL_CLASSES
from aorta.traces.classify import COMMUNICATION
from aorta.why.replay.activity import (
    FOREACH,
    OPTIMIZER,
    OPTIMIZER_SCOPE,
    SHARDING_SCOPE,
    depends_on_batch,
    work_class,
)
from aorta.why.replay.changes.change import FACTOR, Change, UnfitError, form
from aorta.why.replay.changes.collectives import OPS, SMALL_BYTES, collectives_of_activations
from aorta.why.replay.draft import Draft
from aorta.why.replay.graph import ArcKind, NodeKind, Nodes, StepEnd, StepGraph
from aorta.why.replay.run import replay_draft

FIXED_NS = 2_000.0
"""Part of a kernel's time that does not depend on the batch: its start and end on the device."""
PRODUCTS = ("gemm", "attention", "convolution")
"""Classes of kernels that end the backward pass: what follows works on parameters."""
REDUCTION_SCOPE = "FSDP::post_backward_reduce"
CLASSES = tuple(name for name in KERNEL_CLASSES if name != COMMUNICATION)


def scale_class(draft: Draft, label: str, factor: float) -> None:
    """Kernels of a class take factor times as long."""
    nodes = draft.graph.nodes
    chosen = [
        node
        for node in draft.device_work()
        if nodes.kind[node] == NodeKind.KERNEL
        and work_class(nodes.name[node], nodes.program[node], nodes.unit[node]) == label
    ]
    _scale(draft, chosen, factor, f"the traces hold no {label} kernel")


@form(rf"kernels?\s+(?P<name>\S+)\s+{FACTOR}", "kernel flash_fwd x0.5", "kernels with this in their name")
def scale_kernel(draft: Draft, name: str, factor: float) -> None:
    """Kernels with a text in their name take factor times as long."""
    nodes = draft.graph.nodes
    chosen = [node for node in draft.device_work() if name in nodes.name[node]]
    _scale(draft, chosen, factor, f"no kernel has {name!r} in its name")


def _scale(draft: Draft, chosen: list[int], factor: float, why_none: str) -> None:
    if not chosen:
        raise UnfitError(why_none)
    for node in chosen:
        for arc in draft.duration_arcs(node):
            draft.scale(arc, factor)


@form(rf"batch\s+{FACTOR}", "batch x2", "as many samples in one pass of a step")
def scale_batch(draft: Draft, factor: float) -> None:
    """Scales the number of samples that a step processes in one pass."""
    nodes = draft.graph.nodes
    for node in draft.device_work():
        if not depends_on_batch(nodes.name[node], nodes.program[node], nodes.unit[node]):
            continue
        length = draft.duration_ns(node)
        if length > FIXED_NS:
            draft.set_duration(node, FIXED_NS + (length - FIXED_NS) * factor)
    for collective in collectives_of_activations(draft):
        for node in collective.members:
            draft.set_duration(node, draft.duration_ns(node) * factor)
    draft.notes.append(
        "batch: kernels but those of the optimizer and of gathering and reducing parameters are taken to"
        " grow with it, and collectives of activations; the host stays"
    )


@form(
    r"accumulation\s+x\s*(?P<num>\d{1,4})",
    "accumulation x2",
    "micro-batches of this size in a step",
    lambda num: "" if num else "a step has at least one micro-batch",
)
def accumulate(draft: Draft, num: int) -> None:
    """Forward and backward run num times in a step; gradients are reduced in the last one alone."""
    graph = draft.graph
    passes = _passes(draft)
    if not passes:
        raise UnfitError("no kernel of these traces was launched by an optimizer's step")
    without_reductions = draft.copy()
    _drop_reductions(without_reductions)
    _add_up_gradients(without_reductions)
    times = replay_draft(StepGraph(graph, 0), without_reductions).time_ns
    for index, (_, ends) in enumerate(graph.steps):
        lengths = [
            times[2 * passes[end.rank, index].after] - times[end.first]
            for end in ends
            if (end.rank, index) in passes
        ]
        longer = (num - 1) * max(lengths, default=0.0)
        for end in ends:
            rank_pass = passes.get((end.rank, index))
            _lengthen(draft, end, None if rank_pass is None else rank_pass.first, longer)


def _lengthen(draft: Draft, end: StepEnd, work: int | None, longer_ns: float) -> None:
    """Add the passes before the last one to the time of the host and of the device."""
    if work is not None:
        draft.add(end.first, 2 * work + 1, longer_ns + draft.duration_ns(work), ArcKind.DURATION)
    for arc in draft.incoming(end.first, ArcKind.STEP):
        host = draft.graph.arcs.source[arc] // 2
        if draft.graph.nodes.kind[host] == NodeKind.HOST_STEP:
            for call in draft.incoming(2 * host + 1, ArcKind.CALL):
                draft.length_ns[call] += longer_ns


def _drop_reductions(draft: Draft) -> None:
    """Takes out the collectives that reduce gradients, and what launching them costs the host. The copies
    stay: gradients that are not reduced are added up."""
    for collective in draft.collectives(frozenset(("all_reduce", "reduce_scatter"))):
        if (collective.size_bytes or 0) > SMALL_BYTES:
            for node in collective.members:
                draft.take_out(node)


def _add_up_gradients(draft: Draft) -> None:
    """Gradients of fully_shard that are not reduced stay whole, in the type of the reduction: they are cast,
    added up and copied where else they are copied once. 12 bytes of a parameter more, at twice the speed of
    the 6 that the copy moves; a run that accumulates already does it in its trace."""
    nodes, ops = draft.graph.nodes, Counter(collective.op for collective in draft.graph.collectives)
    if ops["all_gather"] > 2 * ops["reduce_scatter"]:
        return
    for node in draft.device_work():
        if REDUCTION_SCOPE in nodes.unit[node] and nodes.kind[node] == NodeKind.KERNEL:
            draft.set_duration(node, 2 * draft.duration_ns(node))


@dataclass(frozen=True, slots=True)
class _Pass:
    """Forward and backward of one step on one rank: kernels."""

    first: int
    after: int
    """The first kernel that works on parameters: clips, or updates."""


def _passes(draft: Draft) -> dict[tuple[int, int], _Pass]:
    """Passes by rank and index of the step."""
    nodes = draft.graph.nodes
    rows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for node in draft.device_work():
        if nodes.kind[node] == NodeKind.KERNEL and nodes.step[node] >= 0:
            rows[nodes.rank[node], nodes.step[node]].append(node)
    passes: dict[tuple[int, int], _Pass] = {}
    for key, kernels in rows.items():
        kernels.sort(key=lambda node: nodes.start_ns[node])
        labels = [work_class(nodes.name[k], nodes.program[k], nodes.unit[k]) for k in kernels]
        updates = [k for k, label in zip(kernels, labels, strict=True) if label == OPTIMIZER]
        products = [row for row, label in enumerate(labels) if label in PRODUCTS]
        if not updates:
            continue
        since = products[-1] if products else 0
        after = [k for k in kernels[since:] if _is_on_parameters(nodes, k)]
        passes[key] = _Pass(kernels[0], min([*after[:1], updates[0]], key=lambda k: nodes.start_ns[k]))
    return passes


def _is_on_parameters(nodes: Nodes, node: int) -> bool:
    scope = f"{nodes.program[node]} {nodes.unit[node]}"
    return bool(OPTIMIZER_SCOPE.search(scope)) or (FOREACH in scope and not SHARDING_SCOPE.search(scope))


@form(r"no\s+contention", "no contention", "kernels are no slower beside collectives than alone")
def without_contention(draft: Draft) -> None:
    """Kernels beside collectives take what they take alone, and none waits for room on the device."""
    draft.has_contention = False
    slowdown = draft.contention
    for arc in slowdown.arcs.tolist():
        draft.cut_to(arc, slowdown.length_ns[arc])
    for node, delay in draft.graph.roomless.items():
        for arc in draft.incoming(2 * node):
            draft.length_ns[arc] -= delay


@form(r"no\s+unexplained\s+delays?", "no unexplained delays", "leaves out what the graph cannot explain")
def without_unexplained(draft: Draft) -> None:
    """Delays that nothing in the traces explains are left out: how much of a replay rests on them."""
    for node, delay in draft.graph.unexplained.items():
        for arc in draft.incoming(2 * node):
            if draft.graph.arcs.kind[arc] != ArcKind.BEGIN:
                draft.length_ns[arc] -= delay


def kernel_class_change(text: str, label: str, factor: float) -> Change:
    """The change of a class of kernels. ReplayError if there is no such class."""
    label = label.lower()
    if label not in CLASSES:
        raise ReplayError(
            f"{text!r}: {label!r} is neither a collective nor a class of kernels"
            f"{did_you_mean(label, (*CLASSES, *OPS), '; classes are ' + ', '.join(CLASSES))}"
        )
    return Change(text, partial(scale_class, label=label, factor=factor))
