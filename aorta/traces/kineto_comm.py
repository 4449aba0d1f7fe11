"""Which activities of a Kineto trace are communication, and what its metadata says of each."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from aorta.timeline.collective import canonical_op
from aorta.traces.classify import HELPERS, UNKNOWN, Classifier, compute_op
from aorta.traces.kineto_file import Args, Distributed, Event

NCCL_RANGE = "nccl:"
"""User annotations of ProcessGroupNCCL: the operation of traces without metadata."""
DTYPE_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "half": 2, "bfloat16": 2, "short": 2, "int": 4, "float": 4,
    "long": 8, "double": 8, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Op:
    name: str
    comm: bool = False
    args: Args | None = None
    """Metadata of the collective, where the trace has any."""


COPIES = {"gpu_memcpy": Op("memcpy"), "gpu_memset": Op("memset")}


@dataclass(frozen=True, slots=True)
class Metadata:
    by_external_id: dict[int | str | None, Args]
    """record_param_comms events that name their collective."""
    ranges: dict[tuple[Any, Any], list[tuple[float, float, str]]]
    """Per thread: start, end and operation of the annotations nccl:<operation>."""


def read_metadata(events: Sequence[Event]) -> Metadata:
    by_id: dict[int | str | None, Args] = {}
    ranges: dict[tuple[Any, Any], list[tuple[float, float, str]]] = {}
    for e in events:
        if e.name == "record_param_comms" and e.args is not None and e.args.collective:
            by_id[e.args.external_id] = e.args
        elif e.cat == "user_annotation" and e.name.startswith(NCCL_RANGE):
            op = canonical_op(e.name.removeprefix(NCCL_RANGE))
            if op is not None:
                ranges.setdefault((e.pid, e.tid), []).append((e.ts, e.ts + (e.dur or 0), op))
    by_id.pop(None, None)
    return Metadata(by_id, ranges)


def classify(
    activities: Sequence[Event], launch_of: Sequence[Event | None], metadata: Metadata, classifier: Classifier
) -> tuple[list[Op], int]:
    """The operation of every activity, and how many are communication by metadata alone."""
    ops: list[Op] = []
    num_by_metadata = 0
    plain: dict[str, Op] = {}
    for e, launch in zip(activities, launch_of, strict=True):
        if e.cat != "kernel":
            ops.append(COPIES[e.cat or ""])
            continue
        named = classifier.comm_op(e.name)
        args = _metadata_of(e, launch, metadata)
        if named is None and args is not None and HELPERS.search(e.name):
            args = None
        if args is None and named is None:
            op = plain.get(e.name)
            if op is None:
                op = plain[e.name] = Op(compute_op(e.name))
            ops.append(op)
            continue
        num_by_metadata += named is None
        from_metadata = canonical_op(str(args.collective)) if args is not None else None
        op_name = from_metadata or _range_op(launch, metadata) or named or UNKNOWN
        ops.append(Op(op_name, comm=True, args=args))
    return ops, num_by_metadata


def _metadata_of(e: Event, launch: Event | None, metadata: Metadata) -> Args | None:
    """Of the kernel itself, else of the record_param_comms that the kernel or its launch is linked to."""
    if e.args is not None:
        if e.args.collective:
            return e.args
        found = metadata.by_external_id.get(e.args.external_id)
        if found is not None:
            return found
    if launch is not None and launch.args is not None:
        return metadata.by_external_id.get(launch.args.external_id)
    return None


def _range_op(launch: Event | None, metadata: Metadata) -> str | None:
    if launch is None:
        return None
    inside = [
        (end - start, op)
        for start, end, op in metadata.ranges.get((launch.pid, launch.tid), ())
        if start <= launch.ts <= end
    ]
    return min(inside)[1] if inside else None


def size_bytes(args: Args | None) -> int | None:
    """The larger of this rank's input and output; None where the trace does not tell."""
    if args is None:
        return None
    element = dtype_bytes(args.dtype)
    nelems = [n for n in (args.in_nelems, args.out_nelems) if type(n) is int and n >= 0]
    return max(nelems) * element if nelems and element else None


def dtype_bytes(dtype: Any) -> int | None:
    name = str(dtype).lower()
    if name.startswith("float8"):
        return 1
    return DTYPE_BYTES.get(name)


def group_ranks(args: Args | None, distributed: Distributed | None) -> list[int] | None:
    """Ranks of the collective's group, from its own metadata or the trace's table of groups.

    Kineto abbreviates long lists ("[0, 1, ..., 63]"); the table has them whole.
    """
    if args is None:
        return None
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
