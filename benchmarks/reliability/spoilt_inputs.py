"""Spoilt traces, records and tables for inputs.py: each must give a number, a warning or one line.

Generated from tables: every field of a good input takes every wrong value, then come wrong structures, wrong
bytes and wrong files. And damaged records of two ranks and 30 steps, each of which must be refused or noted.
"""

import gzip
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from harness import ROOT
from reliability.limited import Ended, Input, aorta_report

from aorta.account.load.open import load_run
from aorta.account.model import Run
from aorta.errors import AortaError
from aorta.records.files import steps_name
from aorta.records.reader import read_run, read_steps
from aorta.records.writer import LineWriter, RunFolder, write_json
from aorta.traces.steps import Reading

EXAMPLE = ROOT / "docs" / "example" / "ddp"
NUM_STEPS = 6
Trace = dict[str, Any]
Event = dict[str, Any]
Call = Callable[[], object]
Lines = list[bytes]
WRONG: dict[str, Any] = {
    "null": None,
    "text": "x",
    "negative": -1,
    "huge": 10**30,
    "1e308": 1e308,
    "list": [],
    "object": {},
    "true": True,
    "empty text": "",
}
EVENT_FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
ARGS_FIELDS = ("correlation", "stream", "device")
HEADER_FIELDS = ("traceEvents", "distributedInfo", "baseTimeNanoseconds", "deviceProperties")
LINE_FIELDS = (
    "global_step",
    "step_ms",
    "rank",
    "world_size",
    "overlap",
    "collectives",
    "schema",
    "origin_unix_ns",
)
BUDGETS = {
    "empty": "",
    "a list": "- 1",
    "no number": "step_ms: {max: x}",
    "infinite": "step_ms: {max: .inf}",
    "not a number": "step_ms: {max: .nan}",
    "400 digits": "step_ms: {max: " + "9" * 400 + "}",
    "unknown metric": "stap_ms: {max: 1}",
    "unknown kind": "step_ms: {most: 1}",
    "aliases": "a: &a [*a]",
    "bytes that are no text": "\udcff",
    "a tag that runs code": "!!python/object/apply:os.system [id]",
    "deep": "[" * 2000,
    "a date": "step_ms: {max: 2001-13-45}",
    "runs below 1": "runs: 0\nstep_ms: {max: 1}",
    "text": "step_ms",
    "a key that is no text": "1: {max: 1}",
}


def spoilt_inputs() -> Iterator[Input]:
    for inputs in (trace_inputs, byte_inputs, record_inputs, file_inputs):
        yield from inputs()


def damaged_records() -> Iterator[Input]:
    """Each must be refused in one line, or noted beside the numbers. Salvaged, each must leave numbers that
    the whole run has, with a note, or be refused in one line."""
    changes: dict[str, Callable[[Path, Path], None]] = {
        what: partial(damage_lines, change=change) for what, change in OF_LINES.items()
    }
    changes |= {"lost_lines: 7": lose_lines, "run.json of another run": exchange_run}
    for kind, read in (("damage", damaged), ("salvage", salvaged)):
        for what, change in changes.items():
            yield Input(kind, what, partial(read, change=change), unnoticed)


# ---- good inputs ---------------------------------------------------------------------------------


def trace(rank: int = 0, world_size: int = 1, num_steps: int = NUM_STEPS, first_step: int = 0) -> Trace:
    """Kineto: steps of 1 ms, kernels of 0.1 ms of which 0.04 overlap."""
    events: list[Event] = []
    number = 0
    for step in range(first_step, first_step + num_steps):
        start = 1000 * (step - first_step)
        mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1}
        events.append(mark | {"ts": start, "dur": 999, "args": {}})
        for i, name in enumerate(("gemm", "ncclDevKernel_AllReduce_Sum")):
            number += 1
            launch = {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "pid": 1,
                "tid": 1,
                "dur": 2,
            }
            events.append(launch | {"ts": start + 10 + 3 * i, "args": {"correlation": number}})
            kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7 + i, "dur": 100}
            args = {"correlation": number, "stream": 7 + i, "device": 0}
            events.append(kernel | {"ts": start + 50 + 60 * i, "args": args})
    return {"distributedInfo": {"rank": rank, "world_size": world_size}, "traceEvents": events}


def made(folder: Path, run_id: str) -> Path:
    """The example's run as this version writes it."""
    run = read_run(EXAMPLE)
    run.run_id = run_id
    for rank in range(2):
        with RunFolder(folder, rank) as empty:
            if rank == 0:
                empty.write_run(run)
        path = folder / steps_name(rank)
        with LineWriter.append(path, with_columns=True) as writer:
            for record in read_steps(EXAMPLE / path.name, []):
                writer.write(msgspec.structs.replace(record, schema=2, run_id=run_id))
    return folder


# ---- traces, bytes, records, files ---------------------------------------------------------------


def report(path: Path, *options: str) -> Call:
    return aorta_report(path, path.parent / "out", *options)


def of_bytes(folder: Path, data: bytes, name: str = "rank0.json") -> Call:
    path = folder / name
    path.write_bytes(data)
    return report(path)


def of_document(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Call:
    document = trace(num_steps=3)
    changed = change(document)
    return of_bytes(folder, json.dumps(document if changed is None else changed).encode())


def put(document: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    for step in place[:-1]:
        document = document[step]
    document[place[-1]] = value


def put_everywhere(document: dict[str, Any], name: str, value: Any) -> None:
    for event in document["traceEvents"]:
        event[name] = value


def of_run(folder: Path, change: Callable[[Path], None], *options: str) -> Call:
    run = folder / "run"
    shutil.copytree(EXAMPLE, run)
    change(run)
    return report(run, *options)


def change_line(run: Path, name: str, value: Any) -> None:
    path = next(iter(sorted(run.glob("rank_*_metrics.jsonl"))))
    lines = path.read_text().splitlines()
    line = json.loads(lines[3])
    line[name] = value
    lines[3] = json.dumps(line)
    path.write_text("\n".join(lines) + "\n")


def change_bytes(run: Path, change: Callable[[bytes], bytes], pattern: str = "rank_0_metrics.jsonl") -> None:
    for path in run.glob(pattern):
        path.write_bytes(change(path.read_bytes()))


def trace_inputs() -> Iterator[Input]:
    for word, value in WRONG.items():
        for field in EVENT_FIELDS:
            for which, index in (("a kernel's", 2), ("a step's", 0)):
                change = partial(put, place=("traceEvents", index, field), value=value)
                yield Input("trace", f"{which} {field} is {word}", partial(of_document, change=change))
        for field in ARGS_FIELDS:
            change = partial(put, place=("traceEvents", 2, "args", field), value=value)
            yield Input("trace", f"a kernel's {field} is {word}", partial(of_document, change=change))
        for field in HEADER_FIELDS:
            change = partial(put, place=(field,), value=value)
            yield Input("trace", f"{field} is {word}", partial(of_document, change=change))
    for field in ("dur", "ts", "name"):
        for word in ("null", "huge", "negative"):
            every = partial(put_everywhere, name=field, value=WRONG[word])
            yield Input("trace", f"every {field} is {word}", partial(of_document, change=every))


def byte_inputs() -> Iterator[Input]:
    whole = json.dumps(trace(num_steps=3)).encode()
    packed = gzip.compress(whole)
    long_name = json.dumps(trace(num_steps=3)).replace("gemm", "a" * 2_000_000).encode()
    texts = {
        "nothing": b"",
        "one brace": b"{",
        "cut": whole[: len(whole) // 2],
        "twice": whole + whole,
        "NUL tail": whole + b"\0" * 4096,
        "NUL head": b"\0" * 64 + whole,
        "NaN": whole.replace(b"100", b"NaN"),
        "Infinity": whole.replace(b"100", b"Infinity"),
        "UTF-16": whole.decode().encode("utf-16"),
        "a byte order mark": b"\xef\xbb\xbf" + whole,
        "no UTF-8": whole.replace(b"gemm", b"\xff\xfe"),
        "deep": b'{"traceEvents":' + b"[" * 100_000,
        "spaces": b'{"traceEvents":[' + b" " * 50_000_000,
        "no events": b'{"traceEvents":[]}',
        "other JSON": b'{"a": 1}',
        "a list": b"[1, 2]",
        "a name of 2 MB": long_name,
        "markup": whole.replace(b"gemm", b"<script>alert(1)</script>"),
        "escapes": whole.replace(b"gemm", b"\\u001b[31m\\nEND"),
        "random bytes": bytes(range(256)) * 100,
        "one key twice": whole[:-1] + b',"traceEvents":[]}',
        "a million brackets": b"[]" * 1_000_000,
        "a number of 100 000 digits": whole.replace(b"100", b"9" * 100_000),
    }
    for word, data in texts.items():
        yield Input("bytes", word, partial(of_bytes, data=data))
    archives = {
        "gzip cut": packed[: len(packed) // 2],
        "gzip flipped": packed[:40] + b"\xff" + packed[41:],
        "gzip of gzip": gzip.compress(packed),
        "gzip tail": packed + b"garbage",
        "bomb of spaces": gzip.compress(b'{"traceEvents":[' + b" " * 400_000_000, 9),
        "bomb of zeros": gzip.compress(b"\0" * 400_000_000, 9),
        "no gzip": b"plain text",
    }
    for word, data in archives.items():
        yield Input("archive", word, partial(of_bytes, data=data, name="rank0.json.gz"))
    for word, name in {"a path out of it": "../../rank0.json", "an absolute path": "/etc/rank0.json"}.items():
        yield Input("archive", f"tar with {word}", partial(of_bytes, data=tar(name), name="a.tar"))
    yield Input("archive", "tar cut", partial(of_bytes, data=tar("rank0.json")[:700], name="a.tar"))
    tables = {
        "SQLite header alone": ("a.db", b"SQLite format 3\0"),
        "SQLite of noise": ("a.db", b"SQLite format 3\0" * 999),
        "CSV header alone": ("a_kernel_trace.csv", b"Kind,Kernel_Name,Start_Timestamp,End_Timestamp\n"),
        "CSV without end": (
            "a_kernel_trace.csv",
            b'Kind,Kernel_Name,Start_Timestamp,End_Timestamp\nK,"a,1,2\n',
        ),
        "CSV of text for times": (
            "a_kernel_trace.csv",
            b"Kind,Kernel_Name,Start_Timestamp,End_Timestamp\nK,a,x,y\n",
        ),
        "rocprofv3 of nothing": ("a_results.json", b'{"rocprofiler-sdk-tool": []}'),
        "rocprofv3 of null": ("a_results.json", b'{"rocprofiler-sdk-tool": null}'),
    }
    for word, (name, data) in tables.items():
        yield Input("table", word, partial(of_bytes, data=data, name=name))


def tar(name: str) -> bytes:
    data = json.dumps(trace(num_steps=3)).encode()
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def record_inputs() -> Iterator[Input]:
    for word, value in WRONG.items():
        for field in LINE_FIELDS:
            change = partial(change_line, name=field, value=value)
            yield Input("record", f"{field} is {word}", partial(of_run, change=change))
    changes: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda data: b"",
        "cut": lambda data: data[: len(data) * 2 // 3],
        "NUL block": lambda data: data[:500] + b"\0" * 512 + data[500:],
        "lines twice": lambda data: data + data,
        "CR LF": lambda data: data.replace(b"\n", b"\r\n"),
        "no line ends": lambda data: data.replace(b"\n", b" "),
        "noise": lambda data: bytes(range(256)) * 200,
        "blank lines": lambda data: b"\n" * 1000 + data,
        "a line of 20 MB": lambda data: data + b'{"a": "' + b"x" * 20_000_000 + b'"}\n',
        "backwards": lambda data: b"\n".join(reversed(data.splitlines())) + b"\n",
    }
    for word, change_of_bytes in changes.items():
        for pattern in ("rank_0_metrics.jsonl", "run.json"):
            change_file = partial(change_bytes, change=change_of_bytes, pattern=pattern)
            yield Input("record", f"{pattern}: {word}", partial(of_run, change=change_file))


def file_inputs() -> Iterator[Input]:
    yield Input("file", "no such file", lambda folder: report(folder / "nothing.json"))
    yield Input("file", "an empty folder", lambda folder: report(folder))
    yield Input("file", "/dev/zero", lambda folder: report(Path("/dev/zero"), "-o", str(folder / "out")))
    yield Input("file", "a pipe", _pipe)
    yield Input("file", "a link to itself", _loop)
    yield Input("file", "a folder named rank0.json", _folder_for_file)
    yield Input("file", "a name of 5000 letters", lambda folder: report(folder / ("a" * 5000)))
    for word, text in BUDGETS.items():
        yield Input("budget", word, partial(_budget, text=text))


def _pipe(folder: Path) -> Call:
    os.mkfifo(folder / "rank0.json")
    return report(folder / "rank0.json")


def _loop(folder: Path) -> Call:
    (folder / "rank0.json").symlink_to(folder / "rank0.json")
    return report(folder / "rank0.json")


def _folder_for_file(folder: Path) -> Call:
    (folder / "rank0.json").mkdir()
    return report(folder / "rank0.json")


def _budget(folder: Path, text: str) -> Call:
    (folder / "budget.yaml").write_bytes(text.encode("utf-8", "surrogateescape"))
    path = folder / "rank0.json"
    path.write_text(json.dumps(trace(num_steps=3)))
    return report(path, "--budget", str(folder / "budget.yaml"))


# ---- damaged records -----------------------------------------------------------------------------


def damaged(folder: Path, change: Callable[[Path, Path], None]) -> Call:
    """Read a run after a change of its folder, with another run beside it; print what is new in its notes."""
    good, run, other = (made(folder / name, name[:3]) for name in ("one_good", "one", "two"))
    change(run, other)

    def notes(place: Path) -> list[str]:
        loaded = load_run(place, "damaged")
        return [text.replace(str(place), "RUN") for text in (*loaded.story, *loaded.notes)]

    def read() -> None:
        try:
            found = notes(run)
        except AortaError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        usual = notes(good)
        for text in found:
            if text not in usual:
                print(f"note: {text}")

    return read


def salvaged(folder: Path, change: Callable[[Path, Path], None]) -> Call:
    """Read what is left of a run after a change of its folder; no number may be another than before."""
    good, run, other = (made(folder / name, name[:3]) for name in ("one_good", "one", "two"))
    change(run, other)
    left = Reading(strict=False)

    def numbers(loaded: Run) -> dict[tuple[int, int], tuple[float, ...]]:
        names = ("step_ms", "comm_ms", "exposed_ms", "compute_ms")
        return {
            (rank, step): tuple(loaded.metrics[name][i, k] for name in names)
            for i, rank in enumerate(loaded.ranks)
            for k, step in enumerate(loaded.global_step.tolist())
        }

    def read() -> None:
        whole = load_run(good, "damaged")
        try:
            found = load_run(run, "damaged", reading=left)
        except AortaError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        wrong = numbers(found).items() - numbers(whole).items()
        assert not wrong, f"numbers that the run never had: {list(wrong)[:3]}"
        usual = [text.replace(str(good), "RUN") for text in (*whole.story, *whole.notes)]
        for text in (*found.story, *found.notes):
            if text.replace(str(run), "RUN") not in usual:
                print(f"note: {text}")

    return read


def unnoticed(end: Ended, folder: Path) -> str | None:
    return None if end.verdict in ("warning", "one line") else "not noticed"


def damage_lines(run: Path, other: Path, change: Callable[[Lines, Lines], Lines]) -> None:
    path = run / "rank_0_metrics.jsonl"
    lines, foreign = (
        file.read_bytes().splitlines(keepends=True) for file in (path, other / "rank_0_metrics.jsonl")
    )
    path.write_bytes(b"".join(change(lines, foreign)))


def lose_lines(run: Path, other: Path) -> None:
    document = read_run(run)
    document.coverage["lost_lines"] = 7
    write_json(run / "run.json", document)


def exchange_run(run: Path, other: Path) -> None:
    (other / "run.json").replace(run / "run.json")


def changed(lines: Lines, old: bytes, new: bytes) -> Lines:
    return [*lines[:7], lines[7].replace(old, new, 1), *lines[8:]]


OF_LINES: dict[str, Callable[[Lines, Lines], Lines]] = {
    "first ten lines gone": lambda a, b: a[10:],
    "ten lines gone": lambda a, b: [*a[:10], *a[20:]],
    "last ten lines gone": lambda a, b: a[:-10],
    "every other line gone": lambda a, b: a[::2],
    "a line twice": lambda a, b: [*a[:5], a[4], *a[5:]],
    "all lines twice": lambda a, b: a + a,
    "two lines exchanged": lambda a, b: [*a[:5], a[6], a[5], *a[7:]],
    "reversed": lambda a, b: a[::-1],
    "last line cut": lambda a, b: [*a[:-1], a[-1][:100]],
    "a line cut in the middle": lambda a, b: [*a[:9], a[9][:100] + b"\n", *a[10:]],
    "second half of another run": lambda a, b: [*a[:15], *b[15:]],
    "another run's rank": lambda a, b: b,
    "the other rank's lines": lambda a, b: [line.replace(b'"rank":0', b'"rank":1') for line in a],
    "a number changed": lambda a, b: changed(a, b'"tokens":256', b'"tokens":255'),
    "negative tokens": lambda a, b: changed(a, b'"tokens":256', b'"tokens":-25'),
    "a bit of a time flipped": lambda a, b: changed(a, b'"comm_ms":', b'"comm_mr":'),
    "step time zeroed": lambda a, b: changed(a, b'"step_ms":', b'"step_ms":0'),
    "NUL in the middle": lambda a, b: [*a[:9], a[9].replace(b",", b"\0", 1), *a[10:]],
    "not UTF-8": lambda a, b: changed(a, b'"host"', b'"h\xffst"'),
    "empty": lambda a, b: [],
}
