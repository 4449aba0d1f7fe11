"""Which operator of torch launched a kernel, with which shapes and in which module, from a Kineto trace.

The call that launched a kernel has its correlation id; the operator is the innermost one that was running on
the same thread then, and so is the module (traces with with_modules or with_stack). External ids are not
used: torch of 2022 repeats the correlation there, and ROCm's tracers write none.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from aorta.errors import TraceError
from aorta.processes import no_garbage_collection
from aorta.traces.files.inflate import unpack
from aorta.traces.kineto.reader import CATEGORIES, EARLIER_CATEGORIES, LAUNCH_CATEGORIES

MODULE = "nn.Module: "
MOST_LETTERS = 200


class LaunchedBy(NamedTuple):
    """'' where the trace does not tell."""

    operator: str = ""
    shapes: str = ""
    module: str = ""


class _Args(msgspec.Struct, gc=False):
    correlation: int | str | None = None
    dims: Any = msgspec.field(name="Input Dims", default=None)


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str = ""
    ts: int | float = 0
    dur: int | float | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    args: _Args | None = None


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


def launchers(data: bytes, location: str) -> dict[int | str, LaunchedBy]:
    """Correlation id -> what launched it; empty where the trace has no operators. TraceError where the bytes
    are no Kineto trace."""
    with no_garbage_collection():
        try:
            events = msgspec.json.decode(unpack(data, location), type=_Trace, strict=False).events
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(f"{location} is not a readable Kineto trace: {error}") from error
        threads: dict[Any, tuple[list[_Event], list[_Event]]] = defaultdict(lambda: ([], []))
        device_ids = {
            e.args.correlation
            for e in events
            if e.args is not None and EARLIER_CATEGORIES.get(e.cat or "", e.cat) in CATEGORIES
        }
        for e in events:
            category = EARLIER_CATEGORIES.get(e.cat or "", e.cat)
            is_module = category == "python_function" and e.name.startswith(MODULE)
            if (category == "cpu_op" or is_module) and e.dur is not None:
                threads[e.pid, e.tid][0].append(e)
            elif category in LAUNCH_CATEGORIES and e.args is not None and e.args.correlation in device_ids:
                threads[e.pid, e.tid][1].append(e)
        return {
            key: launched_by
            for ranges, launches in threads.values()
            for key, launched_by in _of_thread(ranges, launches)
        }


def _of_thread(
    ranges: Sequence[_Event], launches: Sequence[_Event]
) -> Iterable[tuple[int | str, LaunchedBy]]:
    """Launches with the innermost operator and module about each. Ranges of a thread nest."""
    ranges = sorted(ranges, key=lambda e: (e.ts, -(e.dur or 0)))
    open_ranges: list[_Event] = []
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
                    "" if operator is None or operator.args is None else _shapes(operator.args.dims),
                    "" if module is None else module.name.removeprefix(MODULE)[:MOST_LETTERS],
                ),
            )


def _end(event: _Event) -> float:
    return event.ts + (event.dur or 0)


def _shapes(dims: Any) -> str:
    """'64x128, 128x256' of tensors; scalars have no shape."""
    if not isinstance(dims, list):
        return ""
    shapes = ["x".join(map(str, dim)) for dim in dims if isinstance(dim, list) and dim and not _nests(dim)]
    return ", ".join(shapes)[:MOST_LETTERS]


def _nests(dim: list[Any]) -> bool:
    return any(isinstance(size, list) for size in dim)
