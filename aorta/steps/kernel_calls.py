"""Which kernels carried out which collectives of a step: one to one, in the order of their launches.

Nothing is guessed: where the numbers of calls and kernels of an operation differ, all of that operation are
left over, on both sides.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from aorta.steps.raw import RawCall, RawGroup

_KERNEL_OF_OP = {
    "barrier": "all_reduce",
    "all_to_all": "send_recv",
    "send": "send_recv",
    "recv": "send_recv",
    "gather": "send_recv",
    "scatter": "send_recv",
}
"""NCCL runs a barrier as an all-reduce of one element, and these exchanges as sends and receives."""

_ANY = "coalesced"
"""A group of unlike operations: its kernel may be of any."""


class LaunchedKernel(NamedTuple):
    """One communication kernel of a step."""

    op: str
    row: int
    """The caller's number of it."""


class MatchedCalls(NamedTuple):
    kernels_of_call: list[list[int]]
    """Rows of the kernels of every call: none where it has none or they are not known."""
    lone_calls: list[int]
    """Calls that must have had a kernel, and have none."""
    lone_kernels: list[int]
    """Rows of kernels that belong to no call."""


def kernel_op(op: str) -> str:
    """The operation that the kernel of a collective carries out."""
    return _KERNEL_OF_OP.get(op, op)


def has_kernel(call: RawCall, groups: Sequence[RawGroup]) -> bool:
    """Whether a collective runs as a kernel: not on the host, not in a group of one rank."""
    return call.stream != "host" and call.reason is None and len(groups[call.group].ranks) > 1


def match_calls(
    calls: Sequence[RawCall], groups: Sequence[RawGroup], kernels: Sequence[LaunchedKernel]
) -> MatchedCalls:
    """Match the calls of a step to the communication kernels that the step launched.

    Both in the order of launch. A call has one kernel; a coalesced one has as many as it has members where
    the numbers then agree, since a library may launch a group in parts.
    """
    expected = [place for place, call in enumerate(calls) if has_kernel(call, groups)]
    result = MatchedCalls([[] for _ in calls], [], [])
    if _in_order(calls, expected, kernels):
        for place, kernel in zip(expected, kernels, strict=True):
            result.kernels_of_call[place].append(kernel.row)
        return result
    calls_by_op: dict[str, list[int]] = defaultdict(list)
    kernels_by_op: dict[str, list[LaunchedKernel]] = defaultdict(list)
    for place in expected:
        calls_by_op[kernel_op(calls[place].op)].append(place)
    for kernel in kernels:
        kernels_by_op[kernel_op(kernel.op)].append(kernel)
    for op in sorted(calls_by_op.keys() | kernels_by_op.keys()):
        _match_op(calls, calls_by_op[op], kernels_by_op[op], result)
    return result


def _in_order(calls: Sequence[RawCall], expected: Sequence[int], kernels: Sequence[LaunchedKernel]) -> bool:
    if len(expected) != len(kernels):
        return False
    return all(
        calls[place].op == _ANY or kernel_op(calls[place].op) == kernel_op(kernel.op)
        for place, kernel in zip(expected, kernels, strict=True)
    )


def _match_op(
    calls: Sequence[RawCall], places: list[int], kernels: list[LaunchedKernel], result: MatchedCalls
) -> None:
    sizes = [1] * len(places)
    if len(kernels) != len(places):
        sizes = [len(calls[place].members or (None,)) for place in places]
    if len(kernels) != sum(sizes):
        result.lone_calls.extend(places)
        result.lone_kernels.extend(kernel.row for kernel in kernels)
        return
    rows = iter(kernel.row for kernel in kernels)
    for place, size in zip(places, sizes, strict=True):
        result.kernels_of_call[place].extend(next(rows) for _ in range(size))
