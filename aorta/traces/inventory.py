"""Inventory of a rank's device work: kernels, copies and collectives of each step, with what launched them.

`aorta compare` of two traces (aorta.account) sets two inventories side by side. Operators and modules come
from a second reading of a Kineto trace: the RankTrace holds device work alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import numpy as np

from aorta.errors import TraceError
from aorta.processes import no_garbage_collection
from aorta.timeline.arrays import Floats
from aorta.timeline.types import Kind
from aorta.traces.classify import COMM_RULES, COMMUNICATION, COPY, CommRule, classifier, kernel_class
from aorta.traces.kineto import CATEGORIES, EARLIER_CATEGORIES, LAUNCH_CATEGORIES
from aorta.traces.kineto_file import TensorArgs, TensorEvent, decode
from aorta.traces.model import RankTrace, TraceCollective
from aorta.traces.sources import Source
from aorta.traces.steps import Reading

TYPES = {
    "c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64", "long int": "int64",
    "long": "int64", "int": "int32", "bool": "bool", "unsigned char": "uint8", "signed char": "int8",
    "c10::Float8_e4m3fn": "fp8", "c10::Float8_e4m3fnuz": "fp8", "c10::Float8_e5m2": "fp8",
    "c10::Float8_e5m2fnuz": "fp8",
}  # fmt: skip
"""Types of tensors, as Kineto calls those of C++, and as parts of hardware do."""
MODULE = "nn.Module: "
"""Start of the ranges of modules among Python functions."""
MOST_LETTERS = 200
"""Letters of a name that are kept."""


class WorkKey(NamedTuple):
    """Pieces of work that count as the same."""

    kind: Literal["kernel", "copy", "collective"]
    work_class: str
    """One of aorta.traces.classify.KERNEL_CLASSES."""
    name: str
    """Name of the kernel, or operation of the collective."""
    operator: str = ""
    shapes: str = ""
    """Shapes of the operator's inputs; bytes, type and ranks of a collective."""
    module: str = ""
    """Module around the operator; the group of a collective."""
    types: str = ""
    """Types of the operator's inputs, in the order of shapes."""
    repeated: str = ""
    """Which of them repeat one value along a dimension, as expand() does: '1, 0'; '' where none does."""


class WorkTimes(NamedTuple):
    """Times and launches of a piece of work, with a number for each step."""

    ms: Floats
    """Summed durations, which may overlap."""
    launches: Floats


class LaunchQueue(NamedTuple):
    """How far launches were ahead of the device: medians over all launches of kernels and copies."""

    depth: float
    """Launched before and not finished."""
    empty_share: float
    """Of launches before which everything had finished."""
    ahead_ms: float
    """From a launch to its start."""
    num_launches: int


class Inventory(NamedTuple):
    """All device work of a rank, by step."""

    work: dict[WorkKey, WorkTimes]
    num_steps: int
    is_whole_window: bool
    """True where the trace marks no steps: everything counts as one."""
    sequence: tuple[WorkKey, ...]
    """Kernels of the middle step in order of their starts."""
    has_operators: bool
    device: str | None = None
    """As the trace names it."""
    queue: LaunchQueue | None = None
    """None where the trace does not link launches."""


class LaunchedBy(NamedTuple):
    """Operator and module that launched a kernel; '' where the trace does not tell."""

    operator: str = ""
    shapes: str = ""
    module: str = ""
    types: str = ""
    repeated: str = ""


def rank_inventory(source: Source, rank: int, reading: Reading) -> Inventory:
    """The inventory of one rank's trace."""
    trace = reading.read(source, rank)
    by_correlation, queue = _launchers_of_rank(source, rank)
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
    return Inventory(rows, num_steps, not trace.steps, sequence, has_operators, trace.device, queue)


def _keys(
    trace: RankTrace, by_correlation: dict[int | str, LaunchedBy], rules: Sequence[CommRule] = COMM_RULES
) -> list[WorkKey]:
    """The piece of work that each span of the timeline belongs to."""
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


def _launchers_of_rank(source: Source, rank: int) -> tuple[dict[int | str, LaunchedBy], LaunchQueue | None]:
    file = source.files[rank]
    if file.format != "kineto":
        return {}, None
    try:
        return _launchers(file.data(), file.name)
    except TraceError:
        return {}, None  # operators in a form of their own: the kernels were read


def _launchers(data: bytes, location: str) -> tuple[dict[int | str, LaunchedBy], LaunchQueue | None]:
    """Operator and module of each launch, by correlation id, empty where the trace has no operators; and the
    queue of launches.

    Raises TraceError where the bytes are no Kineto trace.
    """
    with no_garbage_collection():
        events = decode(data, location, TensorArgs).events
        threads: dict[Any, tuple[list[TensorEvent], list[TensorEvent]]] = defaultdict(lambda: ([], []))
        device_work = {
            e.args.correlation: e
            for e in events
            if e.args is not None and EARLIER_CATEGORIES.get(e.cat or "", e.cat) in CATEGORIES
        }
        for e in events:
            category = EARLIER_CATEGORIES.get(e.cat or "", e.cat)
            is_module = category == "python_function" and e.name.startswith(MODULE)
            if (category == "cpu_op" or is_module) and e.dur is not None:
                threads[e.pid, e.tid][0].append(e)
            elif category in LAUNCH_CATEGORIES and e.args is not None and e.args.correlation in device_work:
                threads[e.pid, e.tid][1].append(e)
        launched = {
            key: launched_by
            for ranges, launches in threads.values()
            for key, launched_by in _of_thread(ranges, launches)
        }
        return launched, _queue([e for _, launches in threads.values() for e in launches], device_work)


def _queue(launches: Sequence[TensorEvent], device_work: Mapping[Any, TensorEvent]) -> LaunchQueue | None:
    done = [device_work[e.args.correlation] for e in launches if e.args is not None]
    if not done:
        return None
    launch_us = np.array([e.ts for e in launches], dtype=np.float64)
    start_us = np.array([e.ts for e in done], dtype=np.float64)
    end_us = np.sort(start_us + [e.dur or 0 for e in done])
    in_order = np.sort(launch_us)
    depth = np.arange(len(in_order)) - np.searchsorted(end_us, in_order, side="right")
    return LaunchQueue(
        float(np.median(depth)),
        float(np.mean(depth <= 0)),
        float(np.median(start_us - launch_us)) / 1e3,
        len(in_order),
    )


def _of_thread(
    ranges: Sequence[TensorEvent], launches: Sequence[TensorEvent]
) -> Iterable[tuple[int | str, LaunchedBy]]:
    """Launches of a thread, each with the innermost operator and module around it.

    Ranges of a thread nest, so the open ones at a launch are a stack.
    """
    ranges = sorted(ranges, key=lambda e: (e.ts, -(e.dur or 0)))
    open_ranges: list[TensorEvent] = []
    number = 0
    for launch in sorted(launches, key=lambda e: e.ts):
        while number < len(ranges) and ranges[number].ts <= launch.ts:
            while open_ranges and _end(open_ranges[-1]) <= ranges[number].ts:
                open_ranges.pop()
            open_ranges.append(ranges[number])
            number += 1
        while open_ranges and _end(open_ranges[-1]) < launch.ts:
            open_ranges.pop()
        operator = next((e for e in reversed(open_ranges) if not e.name.startswith(MODULE)), None)
        module = next((e for e in reversed(open_ranges) if e.name.startswith(MODULE)), None)
        key = launch.args.correlation if launch.args is not None else None
        if key is not None:
            yield (
                key,
                LaunchedBy(
                    "" if operator is None else operator.name[:MOST_LETTERS],
                    module="" if module is None else module.name.removeprefix(MODULE)[:MOST_LETTERS],
                    **({} if operator is None or operator.args is None else _tensors(operator.args)),
                ),
            )


def _end(event: TensorEvent) -> float:
    return event.ts + (event.dur or 0)


def _tensors(args: TensorArgs) -> dict[str, str]:
    """Of an operator's inputs that are tensors: shapes as '64x128, 128x256', types, which repeat a value."""
    dims, types, strides = (
        value if isinstance(value, list) else [] for value in (args.dims, args.types, args.strides)
    )
    tensors = [
        (dim, kind, stride)
        for dim, kind, stride in zip_longest(dims, types[: len(dims)], strides[: len(dims)])
        if isinstance(dim, list) and dim and not any(isinstance(size, list) for size in dim)
    ]
    repeated = ["1" if isinstance(stride, list) and 0 in stride else "0" for _, _, stride in tensors]
    return {
        "shapes": ", ".join("x".join(map(str, dim)) for dim, _, _ in tensors)[:MOST_LETTERS],
        "types": ", ".join(TYPES.get(str(kind), str(kind)) for _, kind, _ in tensors)[:MOST_LETTERS],
        "repeated": ", ".join(repeated) if "1" in repeated else "",
    }
