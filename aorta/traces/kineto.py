"""Reads a Kineto (torch.profiler) trace into a RankTrace.

kineto_file.py decodes the file. Here its events become the columns that all readers fill in (Activities),
with the metadata of collectives, and assemble.py makes the trace of these.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import TraceError
from aorta.processes import no_garbage_collection
from aorta.records.schema import HostKind
from aorta.timeline.arrays import Ints
from aorta.timeline.collective import canonical_op
from aorta.timeline.types import STEP_ANNOTATION
from aorta.traces.assemble import (
    UNLINKED,
    Activities,
    Category,
    CollectiveInfo,
    StepMark,
    assemble,
    indexed,
    stream_labels,
)
from aorta.traces.classify import COMM_RULES, Classifier, CommRule, classifier, may_be_comm, op_in_name
from aorta.traces.files import read_bytes
from aorta.traces.host_calls import KERNEL_LAUNCH, STEP_NAME, is_mark, step_marks
from aorta.traces.host_spans import (
    COLLECTION,
    NOTED_WAIT_NS,
    HostEvent,
    HostSide,
    Operators,
    host_side,
    kind_of_function,
    kinds_of_ranges,
    libraries_of,
    library_of_range,
    may_be_awaited,
    may_wait,
)
from aorta.traces.kineto_file import (
    Args,
    Distributed,
    KinetoEvent,
    Trace,
    decode,
    intervals_ns,
    is_coarse,
    nanoseconds,
    timed,
)
from aorta.traces.model import RankTrace, known_rank, rank_in_name

CATEGORIES = {"kernel": Category.KERNEL, "gpu_memcpy": Category.COPY, "gpu_memset": Category.MEMSET}
LAUNCH_CATEGORIES = ("runtime", "hip_runtime", "cuda_runtime", "driver", "cuda_driver")
EARLIER_CATEGORIES = {
    "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Runtime": "cuda_runtime",
    "Operator": "cpu_op", "UserAnnotation": "user_annotation",
}  # fmt: skip
"""Categories as torch 1.8 to 1.11 (2021 and 2022) wrote them, and today's names."""
PARAMS = "record_param_comms"
"""Host operator that carries a collective's metadata where its kernel has none."""
NCCL_RANGE = "nccl:"
"""Start of ProcessGroupNCCL's annotations, which name the operation in traces without metadata."""
PEER_COPY = re.compile(r"^Memcpy (PtoP|P2P)")
COLLECTIVE_OPERATORS = ("c10d::", "_c10d_functional::")
"""Starts of the names of operators of process groups: what they launch is communication, whatever library
carries it out."""
SYMMETRIC_OPERATORS = "symm_mem::"
"""Start of the names of operators on symmetric memory, some of which multiply too."""
_SPECIAL = (
    PARAMS, STEP_ANNOTATION, "ProfilerStep#", NCCL_RANGE, *COLLECTIVE_OPERATORS, SYMMETRIC_OPERATORS,
)  # fmt: skip
"""Starts of the names of host events that are used beside launches and what the host did."""
DTYPE_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "half": 2, "bfloat16": 2, "short": 2, "int": 4, "float": 4,
    "long": 8, "double": 8, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip
MOST_ELEMENTS = 2**58
"""Largest believable number of elements; more is damage."""
_NO_ARGS = Args()
_Ranges = dict[tuple[Any, Any], list[tuple[float, float, str]]]
"""Start, end and operation of the annotations nccl:<operation>, by thread."""


def read_kineto(path: Path | str) -> RankTrace:
    """Trace of a .json or .json.gz file."""
    return parse_kineto(read_bytes(path), str(path))


def parse_kineto(
    data: bytes,
    location: str,
    *,
    rules: Sequence[CommRule] = COMM_RULES,
    device_index: str | None = None,
) -> RankTrace:
    """read_kineto of bytes; location names them in errors."""
    with no_garbage_collection():
        trace = decode(data, location, Args)
        del data  # hundreds of MB, which the columns below need
        return rank_trace(trace, location, rules=rules, device_index=device_index)


def rank_trace(
    trace: Trace[Args],
    location: str,
    *,
    rules: Sequence[CommRule] = COMM_RULES,
    device_index: str | None = None,
) -> RankTrace:
    """parse_kineto of a file that is decoded already."""
    rule_classifier = classifier(tuple(rules))
    work, rank, device = _activities(trace, location, rule_classifier)
    return assemble(
        work,
        location,
        rule_classifier,
        source="kineto",
        rank=rank,
        world_size=_world_size(trace),
        device=device,
        versions=_versions(trace),
        device_index=device_index,
    )


def _activities(
    trace: Trace[Args], location: str, classifier: Classifier
) -> tuple[Activities, int, str | None]:
    """Device activities as columns, the rank, and the device's name."""
    by_category = _by_category(trace.events)
    activities = [e for e in trace.events if e.cat in CATEGORIES]
    if not activities:
        raise TraceError(f"{location} holds no GPU activity (kernels, copies): was the GPU traced?")
    args = [e.args or _NO_ARGS for e in activities]
    correlation = [a.correlation for a in args]
    calls = [e for cat in LAUNCH_CATEGORIES for e in by_category[cat] if e.args is not None]
    launches: dict[int | str | None, KinetoEvent] = {e.args.correlation: e for e in calls}  # type: ignore[union-attr]
    launches.pop(None, None)
    launch_of = [launches.get(key) for key in correlation]
    is_launch = {text: bool(KERNEL_LAUNCH.match(text)) for text in {e.name for e in calls}}
    kernel_calls = [e for e in calls if is_launch[e.name]]
    linked_ids = set(correlation)
    dropped = [e.ts for e in kernel_calls if e.args.correlation not in linked_ids]  # type: ignore[union-attr]
    ranges, kinds = _ranges_in_use(by_category)
    special = [e for e in ranges if e.name.startswith(_SPECIAL)]

    # Launches and marks number processes alike: a step takes the work that its own process launched.
    processes: dict[Any, int] = {}
    launch_ns, launch_process = _launch_columns(launch_of, processes, location)
    start_ns = nanoseconds([e.ts for e in activities], location)
    durations = [e.dur for e in activities]
    names, name = indexed([e.name for e in activities])
    of_streams = [a.stream if a.stream is not None else e.tid for e, a in zip(activities, args, strict=True)]
    streams, stream = stream_labels([a.device for a in args], of_streams)
    notes: list[str] = []
    recorded_rank = trace.distributed.rank if trace.distributed else None
    rank = known_rank((recorded_rank, rank_in_name(location)), notes)
    if is_coarse([e.ts for e in activities]):
        notes.append("times are floats too large for nanoseconds: edges are good to 0.25 µs")
    work = Activities(
        start_ns=start_ns,
        end_ns=start_ns + nanoseconds([d or 0 for d in durations], location),
        category=_categories(activities, names, name),
        name=name,
        names=names,
        stream=stream,
        streams=streams,
        launch_ns=launch_ns,
        launch_process=launch_process,
        correlation=correlation,
        marks=_marks(ranges, processes, location),
        num_launches=len(kernel_calls) if calls else None,
        dropped_ns=nanoseconds(dropped, location),
        is_timed=np.array([d is not None for d in durations]) if None in durations else None,
        base_ns=trace.base_ns or 0,
        notes=notes,
        host=_host_side(by_category, ranges, kinds, calls, launch_of, location),
    )
    _add_metadata(work, trace, special, activities, launch_of, classifier)
    return work, rank, _device_name(trace, args)


def _ranges_in_use(
    by_category: dict[str | None, list[KinetoEvent]],
) -> tuple[list[KinetoEvent], dict[str, HostKind]]:
    """Annotations, then operators, whose names are used; and what the host does in some, by name."""
    annotations, operators = by_category["user_annotation"], by_category["cpu_op"]
    names = {e.name for e in operators} | {e.name for e in annotations}  # few of 1e5 events
    kinds = kinds_of_ranges(names)
    used = kinds.keys() | {
        name for name in names if name.startswith(_SPECIAL) or is_mark(name) or library_of_range(name)
    }
    return [e for events in (annotations, operators) for e in events if e.name in used], kinds


def _host_side(
    by_category: dict[str | None, list[KinetoEvent]],
    ranges: list[KinetoEvent],
    kinds: dict[str, HostKind],
    calls: list[KinetoEvent],
    launch_of: list[KinetoEvent | None],
    location: str,
) -> HostSide:
    """What the host did on the threads that mark steps; where none are marked, on those that launch."""
    functions = by_category["python_function"]
    function_names = {e.name for e in functions}
    shown: set[HostKind] = set()
    shown |= {"data", "backward", "optimizer"} if by_category["cpu_op"] else set()
    shown |= {"synchronisation"} if calls else set()
    shown |= {"checkpoint"} if functions else set()
    shown |= {"garbage_collection"} if COLLECTION in function_names else set()
    of_functions = {name: kind for name in function_names if (kind := kind_of_function(name)) is not None}
    backward = [e for e in ranges if kinds.get(e.name) == "backward"]
    noted = [e for e in ranges if kinds.get(e.name, "backward") != "backward"]
    noted += [e for e in functions if e.name in of_functions] if of_functions else []
    kind_of = kinds | of_functions
    least_us = NOTED_WAIT_NS / 1000
    waits = [e for e in calls if e.dur is not None and e.dur >= least_us and may_wait(e.name)]
    side = host_side(
        shown,
        zip([kind_of[e.name] for e in noted], _host_events(noted, location), strict=True),
        _host_events(waits, location),
        _half_copied_ns(by_category["gpu_memcpy"], waits, location),
        _launches_by_thread(launch_of, location),
        Operators(
            *intervals_ns(backward, location),
            {_thread(e.pid, e.tid) for e in backward},
        ),
        {_thread(e.pid, e.tid) for e in ranges if STEP_NAME.match(e.name)},
    )
    return side._replace(libraries=libraries_of({e.name for e in ranges}))


def _half_copied_ns(
    copies: list[KinetoEvent], calls: list[KinetoEvent], location: str
) -> dict[int | str | None, int]:
    """When half of the copies of these calls was done, by correlation; of those that may be awaited."""
    correlations = {e.args.correlation for e in calls if e.args is not None}
    rows = [
        (e.args.correlation, e.ts + (e.dur or 0) / 2)
        for e in copies
        if e.args is not None and e.args.correlation in correlations and may_be_awaited(e.name)
    ]
    half_ns = nanoseconds([half_us for _, half_us in rows], location).tolist()
    return {correlation: ns for (correlation, _), ns in zip(rows, half_ns, strict=True)}


def _launches_by_thread(launch_of: list[KinetoEvent | None], location: str) -> dict[tuple[str, str], Ints]:
    times: dict[tuple[Any, Any], list[int | float]] = {}
    for launch in launch_of:
        if launch is not None:
            times.setdefault((launch.pid, launch.tid), []).append(launch.ts)
    return {_thread(*place): nanoseconds(starts, location) for place, starts in times.items()}


def _host_events(events: list[KinetoEvent], location: str) -> Iterable[HostEvent]:
    for e, start, end in timed(events, location):
        correlation = None if e.args is None else e.args.correlation
        yield HostEvent(e.name, start, end, _thread(e.pid, e.tid), correlation)


@lru_cache(256)
def _thread(process: Any, thread: Any) -> tuple[str, str]:
    """Versions of torch differ in whether numbers are text."""
    return str(process), str(thread)


def _by_category(events: list[KinetoEvent]) -> dict[str | None, list[KinetoEvent]]:
    """Events by category; those of earlier versions of torch under today's names, also in the events."""
    by_category: dict[str | None, list[KinetoEvent]] = defaultdict(list)
    for e in events:
        by_category[e.cat].append(e)
    if by_category.keys().isdisjoint(EARLIER_CATEGORIES):
        return by_category
    for e in events:
        e.cat = EARLIER_CATEGORIES.get(e.cat or "", e.cat)
        if e.args is not None and e.args.external_id is None:
            e.args.external_id = e.args.external_id_2021
    for earlier, current in EARLIER_CATEGORIES.items():
        by_category[current] += by_category.pop(earlier, [])
    return by_category


def _launch_columns(
    launch_of: list[KinetoEvent | None], processes: dict[Any, int], location: str
) -> tuple[Ints, NDArray[np.int32]]:
    """Start of the call that launched each activity (or UNLINKED), and index of its process (or -1)."""
    launch_ns = np.full(len(launch_of), UNLINKED)
    process = np.full(len(launch_of), -1, dtype=np.int32)
    linked = [(i, launch) for i, launch in enumerate(launch_of) if launch is not None]
    if linked:
        places = [i for i, _ in linked]
        launch_ns[places] = nanoseconds([launch.ts for _, launch in linked], location)
        process[places] = [processes.setdefault(launch.pid, len(processes)) for _, launch in linked]
    return launch_ns, process


def _categories(
    activities: list[KinetoEvent], names: tuple[str, ...], name: NDArray[np.int32]
) -> NDArray[np.int8]:
    category = np.array([CATEGORIES[e.cat or ""] for e in activities], dtype=np.int8)
    peers = [i for i, text in enumerate(names) if PEER_COPY.match(text)]
    if peers:
        category[(category == Category.COPY) & np.isin(name, peers)] = Category.PEER_COPY
    return category


def _marks(ranges: list[KinetoEvent], processes: dict[Any, int], location: str) -> list[StepMark]:
    rows = [e for e in ranges if is_mark(e.name)]
    return step_marks(
        (e.name, processes.setdefault(e.pid, len(processes)), start, end)
        for e, start, end in timed(rows, location)
    )


def _device_name(trace: Trace[Args], args: list[Args]) -> str | None:
    """The device's name by its number; ROCm's kernels have another one, which counts the CPUs as well."""
    device = next((a.device for a in args if a.device is not None), None)
    names = {str(row["name"]) for row in trace.devices if row.get("name")}
    named = {str(row["name"]) for row in trace.devices if row.get("id") == device and row.get("name")}
    if trace.hip_runtime_version is not None or not named:
        named = names
    return named.pop() if len(named) == 1 else None


def _versions(trace: Trace[Args]) -> dict[str, str]:
    versions = {
        "nccl": trace.distributed.nccl_version if trace.distributed else None,
        "cuda_runtime": trace.cuda_runtime_version,
        "cuda_driver": trace.cuda_driver_version,
        "hip_runtime": trace.hip_runtime_version,
        "hip_driver": trace.hip_driver_version,
    }
    return {name: str(version) for name, version in versions.items() if type(version) in (int, str)}


def _add_metadata(
    work: Activities,
    trace: Trace[Args],
    special: list[KinetoEvent],
    activities: list[KinetoEvent],
    launch_of: list[KinetoEvent | None],
    classifier: Classifier,
) -> None:
    """Give collectives their metadata (work.info), and weaker hints from annotations (work.hints)."""
    args_of = _collective_args(special, activities, launch_of)
    # Kernels of one record_param_comms share its args: each is read once.
    distinct_args = {id(args): args for args in args_of.values()}
    info_of = {key: _collective_info(args, trace.distributed) for key, args in distinct_args.items()}
    by_operator = _info_of_operators(work, special, launch_of)
    work.info = by_operator | {i: info_of[id(args)] for i, args in args_of.items()}
    ranges = _read_ranges(special)
    if ranges:
        comm_names = {i for i, name in enumerate(work.names) if classifier.comm_op(name) is not None}
        candidates = {i for i, name in enumerate(work.name.tolist()) if name in comm_names} | set(work.info)
        hints = {i: _range_op(launch_of[i], ranges) for i in candidates}
        work.hints = {i: op for i, op in hints.items() if op is not None}


def _collective_args(
    events: Iterable[KinetoEvent], activities: Sequence[KinetoEvent], launch_of: Sequence[KinetoEvent | None]
) -> dict[int, Args]:
    """Metadata of collectives, by index of the activity.

    The kernel's own, else that of the record_param_comms (among events) to which the kernel or its launch is
    linked.
    """
    by_id: dict[int | str | None, Args] = {
        e.args.external_id: e.args
        for e in events
        if e.name == PARAMS and e.args is not None and e.args.collective
    }
    by_id.pop(None, None)
    args_of = {i: e.args for i, e in enumerate(activities) if e.args is not None and e.args.collective}
    if by_id:
        for i, (e, launch) in enumerate(zip(activities, launch_of, strict=True)):
            if i in args_of:
                continue
            args = by_id.get(e.args.external_id) if e.args is not None else None
            if args is None and launch is not None and launch.args is not None:
                args = by_id.get(launch.args.external_id)
            if args is not None:
                args_of[i] = args
    return args_of


def _collective_info(args: Args, distributed: Distributed | None) -> CollectiveInfo:
    return CollectiveInfo(
        op=canonical_op(str(args.collective)),
        group=None if args.group is None else str(args.group),
        ranks=_group_ranks(args, distributed),
        bytes=_size_bytes(args),
        dtype=None if args.dtype is None else str(args.dtype),
    )


def _group_ranks(args: Args, distributed: Distributed | None) -> list[int] | None:
    """Ranks of the collective's group, from its own metadata or the trace's table of groups.

    Kineto abbreviates long lists ("[0, 1, ..., 63]"); the table has them whole.
    """
    text = str(args.ranks or "")
    if re.fullmatch(r"\[\d+(, ?\d+)*\]", text):
        return [int(number) for number in re.findall(r"\d+", text)]
    for row in (distributed.pg_config if distributed else None) or ():
        try:
            group = msgspec.convert(row, _GroupRow)
        except msgspec.ValidationError:
            continue
        if group.pg_name == str(args.group) and group.ranks:
            return group.ranks
    return None


class _GroupRow(msgspec.Struct):
    pg_name: str
    ranks: list[int] = []


def _world_size(trace: Trace[Args]) -> int | None:
    """Ranks of the job by the header, else of the largest group that a collective's metadata tells."""
    if trace.distributed is not None and trace.distributed.world_size is not None:
        return trace.distributed.world_size
    sizes = set()
    for args in (e.args for e in trace.events if e.args is not None and e.args.collective):
        sizes |= {size for size in (args.group_size,) if type(size) is int}
        sizes |= {int(rank) + 1 for rank in re.findall(r"\d{1,6}", str(args.ranks or ""))}
    return max(sizes, default=None)


def _size_bytes(args: Args) -> int | None:
    """Bytes of this rank's input or output, the larger; None where the trace does not tell."""
    element = _dtype_bytes(args.dtype)
    nelems = [n for n in (args.in_nelems, args.out_nelems) if type(n) is int and 0 <= n <= MOST_ELEMENTS]
    return max(nelems) * element if nelems and element else None


def _dtype_bytes(dtype: Any) -> int | None:
    name = str(dtype).lower()
    if name.startswith("float8"):
        return 1
    return DTYPE_BYTES.get(name)


def _info_of_operators(
    work: Activities, operators: Iterable[KinetoEvent], launch_of: Sequence[KinetoEvent | None]
) -> dict[int, CollectiveInfo]:
    """Collectives that operators launched which are made of nothing else, by index of the activity: copies
    between devices, all kernels of a process group, and on symmetric memory those that may be communication
    by their names."""
    scopes: dict[tuple[Any, Any], list[tuple[float, float, str]]] = {}
    for e in sorted(operators, key=lambda e: e.ts):
        if e.name.startswith((*COLLECTIVE_OPERATORS, SYMMETRIC_OPERATORS)):
            rows = scopes.setdefault((e.pid, e.tid), [])
            if not rows or e.ts >= rows[-1][1]:  # the outermost one
                rows.append((e.ts, e.ts + (e.dur or 0), e.name))
    if not scopes:
        return {}
    info: dict[int, CollectiveInfo] = {}
    columns = zip(launch_of, work.category.tolist(), work.name.tolist(), strict=True)
    for i, (launch, category, name) in enumerate(columns):
        if launch is None or (launch.pid, launch.tid) not in scopes:
            continue
        rows = scopes[launch.pid, launch.tid]
        place = bisect_right(rows, launch.ts, key=itemgetter(0)) - 1
        if place < 0 or launch.ts > rows[place][1]:
            continue
        operator = rows[place][2]
        is_collective = operator.startswith(COLLECTIVE_OPERATORS) or may_be_comm(work.names[name])
        if category == Category.PEER_COPY or category == Category.KERNEL and is_collective:
            info[i] = CollectiveInfo(op=canonical_op(op_in_name(operator)))
    return info


def _read_ranges(annotations: Iterable[KinetoEvent]) -> _Ranges:
    ranges: _Ranges = {}
    for e in annotations:
        if e.name.startswith(NCCL_RANGE):
            op = canonical_op(e.name.removeprefix(NCCL_RANGE))
            if op is not None:
                ranges.setdefault((e.pid, e.tid), []).append((e.ts, e.ts + (e.dur or 0), op))
    return ranges


def _range_op(launch: KinetoEvent | None, ranges: _Ranges) -> str | None:
    """Operation of the innermost annotation around the launch."""
    if launch is None:
        return None
    inside = [
        (end - start, op)
        for start, end, op in ranges.get((launch.pid, launch.tid), ())
        if start <= launch.ts <= end
    ]
    return min(inside)[1] if inside else None
