"""Odd but possible inputs whose right numbers are known: the numbers, null with a reason, or one line.

For inputs.py. Traces of six steps of 1 ms, with 0.1 ms of compute and as much communication of which 40 % is
hidden, in formats of other years and with oddities that captures have; and folders of records with what jobs
do to them. Each case says which medians `aorta report` must print, which words beside them, or which line it
must end with.
"""

import gzip
import json
import math
import random
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reliability.limited import Ended, Input, aorta_report, ended
from reliability.spoilt_inputs import EXAMPLE, Event, Trace, trace

RIGHT: dict[str, float | None] = {"compute_ms": 0.1, "comm_ms": 0.1, "hidden_ms": 0.04, "exposed_ms": 0.06}
UNKNOWN: dict[str, float | None] = {"hidden_ms": None, "exposed_ms": None}


def odd_inputs() -> Iterator[Input]:
    for cases in (trace_cases, record_cases):
        for case in cases():
            yield Input("odd", case.name, partial(given, case), partial(problem, case))


@dataclass(frozen=True)
class OddInput:
    name: str
    make: Callable[[Path], Path]
    """Writes into the folder; what is to be reported."""
    medians: dict[str, float | None] | None
    """Right medians by metric; None: the input is refused with one line."""
    words: tuple[str, ...] = ()
    """Words that the output, or the line, must have."""


def events_of(document: Trace, kind: str) -> list[Event]:
    return [event for event in document["traceEvents"] if event.get("cat") == kind]


def single(
    change: Callable[[Trace], Any] = lambda document: None, name: str = "rank0.json"
) -> Callable[[Path], Path]:
    """One trace, changed in place or replaced by what change returns."""

    def make(folder: Path) -> Path:
        document = trace()
        changed = change(document)
        (folder / name).write_text(json.dumps(document if changed is None else changed))
        return folder / name

    return make


def ranks(*documents: Trace, names: tuple[str, ...] = ()) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        run = folder / "traces"
        run.mkdir()
        for i, document in enumerate(documents):
            name = names[i] if names else f"rank{document['distributedInfo']['rank']}.json"
            (run / name).write_text(json.dumps(document))
        return run

    return make


def renamed(kind: str, names: dict[str, str]) -> Callable[[Trace], None]:
    def change(document: Trace) -> None:
        for event in events_of(document, kind):
            event["name"] = names.get(event["name"], event["name"])

    return change


def categories(names: dict[str, str]) -> Callable[[Trace], None]:
    def change(document: Trace) -> None:
        for event in document["traceEvents"]:
            event["cat"] = names.get(event["cat"], event["cat"])

    return change


def moved(offset_us: float) -> Callable[[Trace], None]:
    def change(document: Trace) -> None:
        for event in document["traceEvents"]:
            event["ts"] += offset_us

    return change


def kernel(document: Trace, place: int) -> Event:
    """The place-th kernel of the trace."""
    return events_of(document, "kernel")[place]


def shuffled(document: Trace) -> None:
    random.Random(0).shuffle(document["traceEvents"])


def noisy(document: Trace) -> None:
    """Add events of Chrome's format that are no spans."""
    for phase in "MCsfiPNOD":
        for i in range(20):
            document["traceEvents"].append(
                {
                    "ph": phase,
                    "cat": "ac2g",
                    "name": "x",
                    "pid": 0,
                    "tid": 7,
                    "ts": 17 * i,
                    "id": i,
                    "args": {},
                }
            )


def two_devices(document: Trace) -> None:
    """Add a second device, whose kernels must hide none of the first's."""
    for event in list(events_of(document, "kernel")):
        other = event | {"pid": 1, "args": event["args"] | {"device": 1}, "name": "gemm"}
        document["traceEvents"].append(other | {"ts": event["ts"] + 400})


def huge_gap(document: Trace) -> None:
    for event in document["traceEvents"]:
        if event["ts"] >= 3000:
            event["ts"] += 86_400_000_000


def clock_jump(document: Trace) -> None:
    """Kernels of the third step, by a clock that is an hour off."""
    for event in events_of(document, "kernel")[4:6]:
        event["ts"] -= 3_600_000_000


def packed(data: bytes, name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def zipped(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "rank0.json.zip", "w") as archive:
        archive.writestr("rank0.json", json.dumps(trace()))
    return folder / "rank0.json.zip"


def text_of(change: Callable[[str], str]) -> Callable[[Path], Path]:
    return packed(change(json.dumps(trace())).encode(), "rank0.json")


def run(change: Callable[[Path], None]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        copy = folder / "run"
        shutil.copytree(EXAMPLE, copy)
        change(copy)
        return copy

    return make


def lines(
    change: Callable[[int, dict[str, Any]], dict[str, Any] | None], rank: int | None = None
) -> Callable[[Path], None]:
    """Changes lines of a rank, or of all: what change returns, left out where that is None."""

    def change_run(folder: Path) -> None:
        for path in folder.glob("rank_*_metrics.jsonl" if rank is None else f"rank_{rank}_metrics.jsonl"):
            records = [json.loads(line) for line in path.read_text().splitlines()]
            changed = [change(i, record) for i, record in enumerate(records)]
            path.write_text("".join(json.dumps(record) + "\n" for record in changed if record is not None))

    return change_run


def without_details(_: int, record: dict[str, Any]) -> dict[str, Any]:
    return record | {"active_segments": None, "collectives": None}


def empty_details(_: int, record: dict[str, Any]) -> dict[str, Any]:
    return record | {"active_segments": [], "collectives": [], "num_collectives": 0}


def later(i: int, record: dict[str, Any]) -> dict[str, Any]:
    """A day passes after the tenth step."""
    return record | {"start_unix_ns": record["start_unix_ns"] + 86_400 * 10**9 * (i >= 10)}


def earlier(i: int, record: dict[str, Any]) -> dict[str, Any]:
    """The clock is set back by an hour after the tenth step."""
    return record | {"start_unix_ns": record["start_unix_ns"] - 3600 * 10**9 * (i >= 10)}


def append(folder: Path, rank: int, data: bytes) -> None:
    with open(folder / f"rank_{rank}_metrics.jsonl", "ab") as file:
        file.write(data)


def copied(folder: Path) -> None:
    shutil.copy(folder / "rank_0_metrics.jsonl", folder / "rank_1_metrics.jsonl")


def world_of_four(folder: Path) -> None:
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"world_size": 4}))


def example_medians() -> dict[str, float | None]:
    """Medians of the example's own report."""
    names = ("step_ms", "compute_ms", "comm_ms", "exposed_ms")
    with tempfile.TemporaryDirectory() as folder:
        ended(aorta_report(EXAMPLE, Path(folder) / "out"))
        medians = medians_of(Path(folder) / "out")
    return {name: medians[name] for name in names}


def trace_cases() -> Iterator[OddInput]:
    old_nccl = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
    yield OddInput("as it is", single(), RIGHT | {"step_ms": 1.0})
    yield OddInput("2020: the document is a list", single(lambda d: d["traceEvents"]), None, ("no trace",))
    yield OddInput(
        "2021: categories Kernel and Runtime",
        single(categories({"kernel": "Kernel", "cuda_runtime": "Runtime", "user_annotation": "Operator"})),
        RIGHT,
    )
    yield OddInput(
        "2021: NCCL 2.10's names", single(renamed("kernel", {"ncclDevKernel_AllReduce_Sum": old_nccl})), RIGHT
    )
    generic = renamed(
        "kernel", {"ncclDevKernel_AllReduce_Sum": "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"}
    )
    yield OddInput("RCCL's generic kernel", single(generic), RIGHT)
    yield OddInput(
        "HIP's launches",
        single(renamed("cuda_runtime", {"cudaLaunchKernel": "hipExtModuleLaunchKernel"})),
        RIGHT,
    )
    yield OddInput("events in no order", single(shuffled), RIGHT | {"step_ms": 1.0})
    yield OddInput(
        "every event twice", single(lambda d: d["traceEvents"].extend(list(d["traceEvents"]))), RIGHT
    )
    yield OddInput("flows, counters, instants", single(noisy), RIGHT)
    yield OddInput("steps from 10^9 on", single(lambda d: trace(first_step=10**9)), RIGHT | {"step_ms": 1.0})
    yield OddInput(
        "times of 2^52 us", single(moved(2.0**52)), {}, ("times are floats too large for nanoseconds",)
    )
    yield OddInput("times below 0", single(moved(-2500.0)), RIGHT | {"step_ms": 1.0})
    yield OddInput(
        "times as text", text_of(lambda t: t.replace('"dur": 100', '"dur": "100"')), None, ("dur",)
    )
    yield OddInput("NaN as a time", text_of(lambda t: t.replace('"ts": 1050', '"ts": NaN')), None)
    yield OddInput(
        "one kernel ends before it begins",
        single(lambda d: kernel(d, 4).update(dur=-5)),
        RIGHT,
        ("left out",),
    )
    yield OddInput(
        "one kernel without a duration",
        single(lambda d: kernel(d, 5).update(dur=None)),
        UNKNOWN | {"compute_ms": 0.1, "comm_ms": None},
        ("1 of 6 comm kernels have no duration that can be believed",),
    )
    yield OddInput(
        "one kernel of 5 s",
        single(lambda d: kernel(d, 4).update(dur=5_000_000)),
        UNKNOWN | {"compute_ms": None, "comm_ms": 0.1},
        ("1 of 6 compute kernels have no duration that can be believed",),
    )
    yield OddInput(
        "kernels of no length",
        single(lambda d: [e.update(dur=0) for e in events_of(d, "kernel")] and None),
        {"comm_ms": 0.0, "compute_ms": 0.0},
    )
    yield OddInput(
        "no kernel at all",
        single(lambda d: {"traceEvents": [e for e in d["traceEvents"] if e["cat"] != "kernel"]}),
        None,
    )
    yield OddInput(
        "communication alone",
        single(lambda d: {"traceEvents": [e for e in d["traceEvents"] if e["name"] != "gemm"]}),
        {"comm_ms": 0.1, "exposed_ms": 0.1, "hidden_ms": 0.0, "compute_ms": 0.0},
    )
    yield OddInput(
        "a day between two steps", single(huge_gap), {"comm_ms": 0.1, "exposed_ms": 0.06}, ("spread is wide",)
    )
    yield OddInput(
        "kernels of a step an hour early", single(clock_jump), RIGHT, ("clocks of host and device disagree",)
    )
    # Medians over two ranks: compute of the second device hides nothing of the first.
    yield OddInput(
        "two devices of one process",
        single(two_devices),
        {"comm_ms": 0.05, "hidden_ms": 0.02, "exposed_ms": 0.03},
        ("the trace holds 2 GPUs",),
    )
    yield OddInput(
        "a gzip that ends early",
        packed(gzip.compress(json.dumps(trace()).encode())[:-40], "rank0.json.gz"),
        None,
    )
    yield OddInput("a zip", zipped, None)
    yield OddInput("two ranks", ranks(trace(0, 2), trace(1, 2)), RIGHT | {"step_ms": 1.0})
    yield OddInput("rank 1 of three is missing", ranks(trace(0, 3), trace(2, 3)), None, ("rank 1",))
    yield OddInput("one rank stopped after 4 steps", ranks(trace(0, 2), trace(1, 2, 4)), RIGHT, ("left out",))
    yield OddInput("one rank's steps are others", ranks(trace(0, 2), trace(1, 2, first_step=50)), None)
    yield OddInput(
        "rank 0 twice", ranks(trace(0, 2), trace(0, 2), names=("a.json", "b.json")), None, ("twice",)
    )
    yield OddInput("ranks of 2 and of 4", ranks(trace(0, 2), trace(1, 4)), None)


def record_cases() -> Iterator[OddInput]:
    right = example_medians()
    yield OddInput("a run as it is", run(lambda folder: None), right)
    yield OddInput("no details in any line", run(lines(without_details)), right)
    yield OddInput("details that are empty", run(lines(empty_details)), right)
    yield OddInput(
        "fields of a later version", run(lines(lambda i, r: r | {"colour": {"of": ["it"]}})), right
    )
    yield OddInput("a day passes within the run", run(lines(later)), right)
    yield OddInput("the clocks are set back", run(lines(earlier)), right, ("overlap the next",))
    yield OddInput(
        "one rank has half of the steps", run(lines(lambda i, r: r if i < 16 else None, 1)), {}, ("left out",)
    )
    yield OddInput(
        "one rank lacks every other step", run(lines(lambda i, r: r if i % 2 else None, 1)), {}, ("left out",)
    )
    yield OddInput(
        "a rank's file is missing",
        run(lambda f: (f / "rank_1_metrics.jsonl").unlink()),
        None,
        ("lacks rank 1",),
    )
    yield OddInput("a rank's file is another's", run(copied), None, ("rank 0",))
    yield OddInput("run.json is of four ranks", run(world_of_four), None, ("mixes runs",))
    yield OddInput("no run.json", run(lambda f: (f / "run.json").unlink()), right, ("run.json is missing",))
    yield OddInput(
        "a line is being written",
        run(lambda f: append(f, 1, b'{"schema":2,"rank":1,"wor')),
        right,
        ("cut off",),
    )
    yield OddInput(
        "one rank is of another run",
        run(lines(lambda i, r: r | {"run_id": "x" if r["rank"] else "y"})),
        None,
        ("mixes runs",),
    )
    yield OddInput("steps of no length", run(lines(lambda i, r: r | {"step_ms": 0.0})), None, ("impossible",))
    yield OddInput(
        "steps of 10^9 years", run(lines(lambda i, r: r | {"step_ms": 3e22})), None, ("impossible",)
    )
    yield OddInput(
        "a step in the file twice",
        run(lines(lambda i, r: r | {"global_step": max(1, i), "step": max(1, i)})),
        None,
    )
    yield OddInput("one step alone", run(lines(lambda i, r: r if i == 5 else None)), {})


def given(case: OddInput, folder: Path) -> Callable[[], object]:
    return aorta_report(case.make(folder), folder / "out")


def medians_of(output: Path) -> dict[str, float | None]:
    """Medians of the one dataset that a report wrote."""
    (of_label,) = json.loads((output / "summary.json").read_text())["datasets"].values()
    return {name: numbers["median"] for name, numbers in of_label["steps"].items()}


def problem(case: OddInput, end: Ended, folder: Path) -> str | None:
    """The fault of an outcome, None if it is right."""
    status, text = end.status, end.errors if end.status else end.text
    if "Traceback" in text or status not in (0, 2):
        return f"status {status}"
    if (status == 2) != (case.medians is None):
        return f"{'refused' if status == 2 else 'not refused'}"
    if status == 2 and len(text.strip().splitlines()) != 1:
        return "more than one line"
    medians = medians_of(folder / "out") if status == 0 else {}
    for name, expected in (case.medians or {}).items():
        value = medians[name]
        if value is None or expected is None:
            if value is not expected:
                return f"{name} of {value}, not {expected}"
        elif not math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9):
            return f"{name} of {value:g}, not {expected:g}"
    missing = [word for word in case.words if word not in text]
    return f"no word of {missing[0]!r}" if missing else None
