"""What the metadata of a Kineto trace says of its collectives."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from aorta.timeline.collective import canonical_op
from aorta.traces.assemble import CollectiveInfo
from aorta.traces.kineto.file import Args, Distributed, KinetoEvent

NCCL_RANGE = "nccl:"
"""User annotations of ProcessGroupNCCL: the operation of traces without metadata."""
PARAMS = "record_param_comms"
DTYPE_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "half": 2, "bfloat16": 2, "short": 2, "int": 4, "float": 4,
    "long": 8, "double": 8, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip

MOST_ELEMENTS = 2**58
"""More is damage."""

Ranges = dict[tuple[Any, Any], list[tuple[float, float, str]]]


def collective_args(
    events: Iterable[KinetoEvent], activities: Sequence[KinetoEvent], launch_of: Sequence[KinetoEvent | None]
) -> dict[int, Args]:
    """Metadata by activity: the kernel's own, else that of the record_param_comms (among events) to
    which the kernel or its launch is linked."""
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


def information(args: Args, distributed: Distributed | None) -> CollectiveInfo:
    return CollectiveInfo(
        op=canonical_op(str(args.collective)),
        group=None if args.group is None else str(args.group),
        ranks=group_ranks(args, distributed),
        bytes=size_bytes(args),
        dtype=None if args.dtype is None else str(args.dtype),
    )


def read_ranges(annotations: Iterable[KinetoEvent]) -> Ranges:
    """Per thread: start, end and operation of the annotations nccl:<operation>."""
    ranges: Ranges = {}
    for e in annotations:
        if e.name.startswith(NCCL_RANGE):
            op = canonical_op(e.name.removeprefix(NCCL_RANGE))
            if op is not None:
                ranges.setdefault((e.pid, e.tid), []).append((e.ts, e.ts + (e.dur or 0), op))
    return ranges


def range_op(launch: KinetoEvent | None, ranges: Ranges) -> str | None:
    """The operation of the innermost annotation around the launch."""
    if launch is None:
        return None
    inside = [
        (end - start, op)
        for start, end, op in ranges.get((launch.pid, launch.tid), ())
        if start <= launch.ts <= end
    ]
    return min(inside)[1] if inside else None


def size_bytes(args: Args) -> int | None:
    """The larger of this rank's input and output; None where the trace does not tell."""
    element = dtype_bytes(args.dtype)
    nelems = [n for n in (args.in_nelems, args.out_nelems) if type(n) is int and 0 <= n <= MOST_ELEMENTS]
    return max(nelems) * element if nelems and element else None


def dtype_bytes(dtype: Any) -> int | None:
    name = str(dtype).lower()
    if name.startswith("float8"):
        return 1
    return DTYPE_BYTES.get(name)


def group_ranks(args: Args, distributed: Distributed | None) -> list[int] | None:
    """Ranks of the collective's group, from its own metadata or the trace's table of groups.

    Kineto abbreviates long lists ("[0, 1, ..., 63]"); the table has them whole.
    """
    text = str(args.ranks or "")
    if re.fullmatch(r"\[\d+(, ?\d+)*\]", text):
        return [int(number) for number in re.findall(r"\d+", text)]
    for row in (distributed.pg_config if distributed else None) or ():
        try:
            group = msgspec.convert(row, _Group)
        except msgspec.ValidationError:
            continue
        if group.pg_name == str(args.group) and group.ranks:
            return group.ranks
    return None


class _Group(msgspec.Struct):
    pg_name: str
    ranks: list[int] = []
