"""What a rank's device did in each step, piece by piece: kernels, copies and collectives with what launched
them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.errors import TraceError
from aorta.timeline.types import Kind
from aorta.traces.cache import Reading
from aorta.traces.classify import COMM_RULES, COMMUNICATION, COPY, CommRule, classifier, kernel_class
from aorta.traces.files import read_bytes
from aorta.traces.kineto import LaunchedBy, launchers
from aorta.traces.model import RankTrace, TraceCollective
from aorta.traces.sniff import read_member
from aorta.traces.sources import Source

Floats = NDArray[np.float64]


class WorkKey(NamedTuple):
    """Pieces of work that count as the same."""

    kind: Literal["kernel", "copy", "collective"]
    work_class: str
    """Of aorta.traces.classify; communication of collectives."""
    name: str
    """The kernel's, or the collective's operation."""
    operator: str = ""
    shapes: str = ""
    """Of the operator's inputs; bytes, type and ranks of a collective."""
    module: str = ""
    """Of the operator; the group of a collective."""


class WorkTimes(NamedTuple):
    """By step."""

    ms: Floats
    """Summed durations, which may overlap."""
    launches: Floats


class Inventory(NamedTuple):
    work: dict[WorkKey, WorkTimes]
    num_steps: int
    is_whole_window: bool
    """The trace marks no steps: everything counts as one."""
    sequence: tuple[WorkKey, ...]
    """Kernels of the middle step in order of their starts."""
    has_operators: bool


def rank_inventory(source: Source, rank: int, reading: Reading) -> Inventory:
    """Of one rank's trace; read a second time for operators where it is Kineto's."""
    trace = replace(reading, cache=False).read(source, rank)  # a cached one does not tell who launched what
    by_correlation = _launchers(source, rank)
    keys = _keys(trace, by_correlation, reading.rules)
    num_steps = max(len(trace.steps), 1)
    step = trace.launch_step if trace.steps else np.zeros(len(trace.timeline), dtype=np.int64)
    line = trace.timeline
    length_ms = line.end_ms - line.start_ms
    index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    place = np.fromiter((index[key] for key in keys), np.int64, len(keys))
    inside = step >= 0
    cells = place[inside] * num_steps + step[inside]
    shape = (len(index), num_steps)
    ms = np.bincount(cells, length_ms[inside], shape[0] * num_steps).reshape(shape)
    count = np.bincount(cells, minlength=shape[0] * num_steps).reshape(shape).astype(float)
    rows = {key: WorkTimes(ms[i], count[i]) for key, i in index.items() if count[i].any()}
    middle = np.flatnonzero(step == num_steps // 2)
    in_order = middle[np.argsort(line.start_ms[middle], kind="stable")].tolist()
    sequence = tuple(keys[i] for i in in_order if keys[i].kind == "kernel")
    has_operators = any(launched.operator for launched in by_correlation.values())
    return Inventory(rows, num_steps, not trace.steps, sequence, has_operators)


def _launchers(source: Source, rank: int) -> dict[int | str, LaunchedBy]:
    file = source.files[rank]
    if file.format != "kineto":
        return {}
    first = Path(file.paths[0])
    try:
        return launchers(read_member(first, file.member) if file.member else read_bytes(first), file.name)
    except TraceError:
        return {}  # JAX's traces have no operators of torch


def _keys(
    trace: RankTrace, by_correlation: dict[int | str, LaunchedBy], rules: Sequence[CommRule] = COMM_RULES
) -> list[WorkKey]:
    """One per span of the timeline."""
    line = trace.timeline
    unknown = LaunchedBy()
    comm_op = classifier(tuple(rules)).comm_op
    classes = [kernel_class(name) if comm_op(name) is None else COMMUNICATION for name in line.names]
    collectives: dict[tuple[float, str, str], TraceCollective] = {
        (c.start_ms, c.stream, c.kernel): c for c in trace.collectives
    }
    correlation: Sequence[int | str | None] = trace.correlation or [None] * len(line)
    keys = []
    for start, kind, stream, name, op, number in zip(
        line.start_ms.tolist(), line.kind.tolist(), line.stream.tolist(), line.name.tolist(),
        line.op.tolist(), correlation, strict=True,
    ):  # fmt: skip
        if kind == Kind.COMM:
            collective = collectives.get((start, line.streams[stream], line.names[name]))
            keys.append(_of_collective(collective, line.ops[op]))
            continue
        launched = by_correlation.get(number, unknown) if number is not None else unknown
        is_kernel = kind == Kind.COMPUTE
        keys.append(
            WorkKey(
                "kernel" if is_kernel else "copy",
                classes[name] if is_kernel else COPY,
                line.names[name],
                *launched,
            )
        )
    return keys


def _of_collective(collective: TraceCollective | None, op: str) -> WorkKey:
    if collective is None:
        return WorkKey("collective", COMMUNICATION, op)
    parts = [
        "" if collective.bytes is None else f"{collective.bytes:,} B",
        collective.dtype or "",
        "" if not collective.ranks else f"{len(collective.ranks)} ranks",
    ]
    return WorkKey("collective", COMMUNICATION, op, "", " ".join(filter(None, parts)), collective.group or "")
