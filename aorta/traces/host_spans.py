"""What the host did in a trace, as the spans of step records: by names of ranges, Python functions and
runtime calls.

Of the threads that launch work: others, and a loader's workers, go on beside the step.
"""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from aorta.records.schema import HostKind
from aorta.timeline.arrays import Ints

NOTED_WAIT_NS = 20_000
"""Length from which on a wait, or a collection of garbage, counts: as in step records."""
BRIEF: frozenset[HostKind] = frozenset(("synchronisation", "garbage_collection"))
"""Kinds that only count from that length on."""
SYNCHRONISES = re.compile(
    r"^(cuda|cu|hip)(Ctx|Device|Stream|Event)Synchronize(_ptsz)?(_v\d+)?$|^(cuda|hip)(Memcpy|Free)(_v\d+)?$",
)
"""Runtime calls that may block the host until the device is done."""
COPIES = re.compile(r"^(cuda|cu|hip)Memcpy")
"""Runtime calls that start a copy. Of pageable memory they return when it is done, whatever their name."""
RETURNS_AT_ONCE = re.compile(r"DtoD|PtoP|P2P|Device_?to_?Device|Pinned", re.IGNORECASE)
"""Copies, by the names that profilers give them, whose call does not wait for them: within devices, and of
pinned memory. That it ends behind one says that the device had nothing else to do."""
LOADER = re.compile(
    r"data_?load|load_?(batch|data)|next_?batch|batch_?feed|wait_for_batch|aorta\.data", re.IGNORECASE
)
UPDATE = "Optimizer.step#"
"""Start of the range around an optimizer's step, before its name."""
EVALUATE = "autograd::engine::evaluate_function"
"""Start of the names of the engine's ranges in a backward pass, on whatever thread it runs."""
GRADIENT = re.compile(r"AccumulateGrad$|Backward\d*$")
"""The operators in them: all that versions of torch before 1.13 name."""
COLLECTION = "Python GC"
SERVED = (
    r"execute_(?:model$|(?:context_|new_)?\d)|step\[[a-z]|(?:run|forward)_batch\b|gpu_model_runner: forward$"
    r"|\[Executor\] _forward_step\b(?: (?P<executed>\d{1,18})\b)?"
)
"""Annotations around one iteration of vLLM, SGLang and TensorRT-LLM."""
LIBRARIES: Mapping[str, re.Pattern[str]] = {
    "ddp": re.compile(r"DistributedDataParallel\.forward$|torch\.distributed\.ddp\.reducer::"),
    "server": re.compile(rf"{SERVED}|(?:vllm|sgl_kernel|trtllm)::", re.IGNORECASE),
}
"""What runs the program, by how names of its ranges and operators begin."""
SAVE = re.compile(
    r"(^|/)torch/(serialization\.py\(\d+\): save"
    r"|distributed/checkpoint/state_dict_saver\.py\(\d+\): (async_)?save)$"
)
"""Python functions that save a checkpoint."""
NO_RANGES = "the trace names no operators of the host"
NO_CALLS = "the trace shows no host calls"
NOT_SHOWN: Mapping[HostKind, str] = {
    "data": NO_RANGES,
    "backward": NO_RANGES,
    "optimizer": NO_RANGES,
    "checkpoint": "the trace shows no Python functions",
    "garbage_collection": "the trace shows no garbage collections",
    "synchronisation": NO_CALLS,
    "pause": "a trace does not hold it",
}
"""Why a trace may not tell of a kind."""


class HostEvent(NamedTuple):
    """A range, a function or a call on a thread of the host, as a trace has it."""

    name: str
    start_ns: int
    end_ns: int
    thread: Hashable
    correlation: Hashable = None


class Operators(NamedTuple):
    """Operators of backward passes, as columns."""

    start_ns: Ints
    end_ns: Ints
    threads: AbstractSet[Hashable]


NO_OPERATORS = Operators(np.empty(0, np.int64), np.empty(0, np.int64), frozenset())


class HostNote(NamedTuple):
    """Something that the program did on the host."""

    kind: HostKind
    start_ns: int
    end_ns: int
    where: str = ""
    """Name of the loader, the optimizer or the call that waits."""


class HostSide(NamedTuple):
    """What a trace tells of the host."""

    notes: Sequence[HostNote] = ()
    shown: AbstractSet[HostKind] = frozenset()
    """Kinds that would be among the notes, had they been."""
    libraries: AbstractSet[str] = frozenset()
    """Those of LIBRARIES that ranges name."""

    @property
    def not_shown(self) -> dict[HostKind, str]:
        """Why, by kind."""
        return {kind: reason for kind, reason in NOT_SHOWN.items() if kind not in self.shown}


@lru_cache(4096)
def is_data_loading(program: str) -> bool:
    """True if the part of the program with this name fetches the next batch."""
    return LOADER.search(program) is not None


@lru_cache(4096)
def kind_of_range(name: str) -> HostKind | None:
    """The kind of an operator or annotation; None of most."""
    if name.startswith(UPDATE):
        return "optimizer"
    if is_data_loading(name):
        return "data"
    return "backward" if name.startswith(EVALUATE) or GRADIENT.search(name) else None


def kinds_of_ranges(names: AbstractSet[str]) -> dict[str, HostKind]:
    """The kinds of the names that have one, without those that only lie within others."""
    kinds = {name: kind for name in names if (kind := kind_of_range(name)) is not None}
    if any(name.startswith(EVALUATE) for name in names):
        return {name: kind for name, kind in kinds.items() if kind != "backward" or name.startswith(EVALUATE)}
    return kinds


@lru_cache(4096)
def library_of_range(name: str) -> str | None:
    """The library of an operator or annotation, one of LIBRARIES; None of most."""
    return next((library for library, pattern in LIBRARIES.items() if pattern.match(name)), None)


def libraries_of(names: Iterable[str]) -> frozenset[str]:
    """The libraries that names of ranges tell."""
    return frozenset(filter(None, map(library_of_range, names)))


def kind_of_function(name: str) -> HostKind | None:
    """The kind of a Python function, named as torch.profiler does; None of most."""
    if name == COLLECTION:
        return "garbage_collection"
    return "checkpoint" if SAVE.search(name) else None


def may_wait(name: str) -> bool:
    """True of runtime calls that may wait for the device, or for the copy that they start."""
    return (SYNCHRONISES.match(name) or COPIES.match(name)) is not None


def may_be_awaited(copy: str) -> bool:
    """True of copies whose call may wait for them: of the host's pageable memory."""
    return RETURNS_AT_ONCE.search(copy) is None


def host_side(
    shown: AbstractSet[HostKind],
    noted: Iterable[tuple[HostKind, HostEvent]],
    calls: Iterable[HostEvent],
    copied_ns: Mapping[Any, int],
    launch_ns: Mapping[Any, Ints],
    backward: Operators = NO_OPERATORS,
    main: AbstractSet[Hashable] = frozenset(),
) -> HostSide:
    """What the host did on the threads of the training loop, and on those that run backward passes.

    shown: kinds that the trace could hold. noted: ranges and functions that have another kind than backward.
    calls: of the runtime. copied_ns: when half of a copy that may be awaited was done, by correlation: its
    call had returned then, or waited. launch_ns: launches of device work by thread. main: threads of the
    loop; empty: those that launch.
    """
    main = main or launch_ns.keys()
    found = list(noted)
    for event in calls:
        half_ns = copied_ns.get(event.correlation)
        if SYNCHRONISES.match(event.name) or (half_ns is not None and event.end_ns >= half_ns):
            found.append(("synchronisation", event))
    notes = [
        HostNote(kind, event.start_ns, event.end_ns, _where(kind, event.name))
        for kind, event in found
        if (event.thread in main or event.thread in backward.threads)
        and (kind not in BRIEF or event.end_ns - event.start_ns >= NOTED_WAIT_NS)
    ]
    # The loop waits for its backward pass: between two of them it launches.
    of_loop = [launch_ns[thread] for thread in launch_ns.keys() & main - backward.threads]
    notes += _passes(backward, np.sort(np.concatenate(of_loop)) if of_loop else np.empty(0, np.int64))
    return HostSide(sorted(notes, key=lambda note: note.start_ns), frozenset(shown))


def _where(kind: HostKind, name: str) -> str:
    if kind == "synchronisation":
        return name
    return name.partition("#")[2].removesuffix(".step") if kind in ("data", "optimizer") else ""


def _passes(operators: Operators, launch_ns: Ints) -> list[HostNote]:
    """Backward passes: their operators, joined where the loop launches nothing between them."""
    if not len(operators.start_ns):
        return []
    order = np.argsort(operators.start_ns, kind="stable")
    start, reached = operators.start_ns[order], np.maximum.accumulate(operators.end_ns[order])
    is_gap = reached[:-1] < start[1:]
    if len(launch_ns):
        is_gap &= np.searchsorted(launch_ns, reached[:-1]) < np.searchsorted(launch_ns, start[1:])
    first = np.flatnonzero(np.concatenate(([True], is_gap)))
    ends = reached[np.append(first[1:], len(start)) - 1]
    return [HostNote("backward", *edges) for edges in zip(start[first].tolist(), ends.tolist(), strict=True)]
