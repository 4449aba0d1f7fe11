"""Hostile traces, records and budgets must give a number, a warning or one line, never a traceback.

    python benchmarks/reliability/hostile_inputs.py [--output inputs.csv] [-k WORD]

Cases are generated from tables: every field of a good input takes every wrong value, then come wrong
structures, wrong bytes and wrong files. Each goes through `aorta report` (or the gate) in a process of its
own with limits of 1 GB above what the program takes by itself and 5 s of CPU. Exit status 1 where one fails.
"""

import gzip
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from harness import ROOT, arguments, write  # noqa: E402
from reliability.limited import ended  # noqa: E402
from reliability.made_trace import Trace, trace  # noqa: E402

from aorta.cli import main as aorta_command  # noqa: E402
from aorta.records.reader import read_steps  # noqa: E402, F401

EXAMPLE = ROOT / "docs" / "example" / "ddp"
QUICK = ["--no-page", "--no-pictures", "--no-perfetto", "--no-parquet", "--no-cache"]
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


@dataclass(frozen=True)
class HostileInput:
    group: str
    name: str
    make: Callable[[Path], list[str]]
    """Writes into the folder and returns the command line."""


@dataclass
class Given:
    group: str
    name: str
    outcome: str
    """number, warning, one line, FAILED."""
    text: str
    status: int
    cpu_s: float
    peak_mb: float


def good_trace() -> Trace:
    return trace(num_steps=3)


def report(path: Path, *options: str) -> list[str]:
    return ["report", str(path), "-o", str(path.parent / "out"), *QUICK, *options]


def of_bytes(folder: Path, data: bytes, name: str = "rank0.json") -> list[str]:
    path = folder / name
    path.write_bytes(data)
    return report(path)


def of_document(folder: Path, change: Callable[[dict[str, Any]], Any]) -> list[str]:
    document = good_trace()
    changed = change(document)
    return of_bytes(folder, json.dumps(document if changed is None else changed).encode())


def put(document: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    for step in place[:-1]:
        document = document[step]
    document[place[-1]] = value


def put_everywhere(document: dict[str, Any], name: str, value: Any) -> None:
    for event in document["traceEvents"]:
        event[name] = value


def of_run(folder: Path, change: Callable[[Path], None], *options: str) -> list[str]:
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


def trace_inputs() -> Iterator[HostileInput]:
    for word, value in WRONG.items():
        for field in EVENT_FIELDS:
            for which, index in (("a kernel's", 2), ("a step's", 0)):
                change = partial(put, place=("traceEvents", index, field), value=value)
                yield HostileInput("trace", f"{which} {field} is {word}", partial(of_document, change=change))
        for field in ARGS_FIELDS:
            change = partial(put, place=("traceEvents", 2, "args", field), value=value)
            yield HostileInput("trace", f"a kernel's {field} is {word}", partial(of_document, change=change))
        for field in HEADER_FIELDS:
            change = partial(put, place=(field,), value=value)
            yield HostileInput("trace", f"{field} is {word}", partial(of_document, change=change))
    for field in ("dur", "ts", "name"):
        for word in ("null", "huge", "negative"):
            every = partial(put_everywhere, name=field, value=WRONG[word])
            yield HostileInput("trace", f"every {field} is {word}", partial(of_document, change=every))


def byte_inputs() -> Iterator[HostileInput]:
    whole = json.dumps(good_trace()).encode()
    packed = gzip.compress(whole)
    long_name = json.dumps(good_trace()).replace("gemm", "a" * 2_000_000).encode()
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
        yield HostileInput("bytes", word, partial(of_bytes, data=data))
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
        yield HostileInput("archive", word, partial(of_bytes, data=data, name="rank0.json.gz"))
    for word, name in {"a path out of it": "../../rank0.json", "an absolute path": "/etc/rank0.json"}.items():
        yield HostileInput("archive", f"tar with {word}", partial(of_bytes, data=tar(name), name="a.tar"))
    yield HostileInput("archive", "tar cut", partial(of_bytes, data=tar("rank0.json")[:700], name="a.tar"))
    binary = {
        "nothing": b"",
        "no field": b"\x07",
        "length beyond the end": b"\x0a\xff\xff\xff\x7f",
        "number without end": b"\xff" * 64,
        "a plane that nests": b"\x0a\x02\x1a\x00" * 1000,
        "text": b"hello",
    }
    for word, data in binary.items():
        yield HostileInput("xplane", word, partial(of_bytes, data=data, name="vm.xplane.pb"))
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
        yield HostileInput("table", word, partial(of_bytes, data=data, name=name))


def tar(name: str) -> bytes:
    data = json.dumps(good_trace()).encode()
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def record_inputs() -> Iterator[HostileInput]:
    for word, value in WRONG.items():
        for field in LINE_FIELDS:
            change = partial(change_line, name=field, value=value)
            yield HostileInput("record", f"{field} is {word}", partial(of_run, change=change))
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
            yield HostileInput("record", f"{pattern}: {word}", partial(of_run, change=change_file))


def file_inputs() -> Iterator[HostileInput]:
    yield HostileInput("file", "no such file", lambda folder: report(folder / "nothing.json"))
    yield HostileInput("file", "an empty folder", lambda folder: report(folder))
    yield HostileInput(
        "file", "/dev/zero", lambda folder: report(Path("/dev/zero"), "-o", str(folder / "out"))
    )
    yield HostileInput("file", "a pipe", _pipe)
    yield HostileInput("file", "a link to itself", _loop)
    yield HostileInput("file", "a folder named rank0.json", _folder_for_file)
    yield HostileInput("file", "a name of 5000 letters", lambda folder: report(folder / ("a" * 5000)))
    for word, text in BUDGETS.items():
        yield HostileInput("budget", word, partial(_budget, text=text))


def _pipe(folder: Path) -> list[str]:
    os.mkfifo(folder / "rank0.json")
    return report(folder / "rank0.json")


def _loop(folder: Path) -> list[str]:
    (folder / "rank0.json").symlink_to(folder / "rank0.json")
    return report(folder / "rank0.json")


def _folder_for_file(folder: Path) -> list[str]:
    (folder / "rank0.json").mkdir()
    return report(folder / "rank0.json")


def _budget(folder: Path, text: str) -> list[str]:
    (folder / "budget.yaml").write_bytes(text.encode("utf-8", "surrogateescape"))
    path = folder / "rank0.json"
    path.write_text(json.dumps(good_trace()))
    return report(path, "--budget", str(folder / "budget.yaml"))


INPUTS = (trace_inputs, byte_inputs, record_inputs, file_inputs)


def give(given: HostileInput) -> Given:
    with tempfile.TemporaryDirectory() as name:
        arguments = given.make(Path(name))
        end = ended(partial(aorta_command.main, arguments, prog_name="aorta"))
        shown = end.first_line.replace(name, "PLACE")[:160]
    verdict = "FAILED" if end.status == 1 else end.verdict  # no limit of a budget can be violated here
    return Given(given.group, given.name, verdict, shown, end.status, round(end.cpu_s, 2), end.peak_mb)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("-k", dest="word", default="")
    options = parser.parse_args()
    start = time.perf_counter()
    rows = []
    for inputs in INPUTS:
        for given in inputs():
            if options.word not in f"{given.group} {given.name}":
                continue
            row = give(given)
            rows.append(row)
            if row.outcome == "FAILED" or options.word:
                print(
                    f"{row.group}: {row.name}: {row.outcome} {row.status} {row.cpu_s} s"
                    f" {row.peak_mb:.0f} MB {row.text}",
                    flush=True,
                )
    counts = Counter((row.group, row.outcome) for row in rows)
    kinds = ("number", "warning", "one line", "FAILED")
    lines = ["| group | inputs | number | number and warning | one line | failed | most CPU s | most MB |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        cells = [str(counts[group, kind]) for kind in kinds]
        most = f"{max(row.cpu_s for row in members):.1f} | {max(row.peak_mb for row in members):.0f}"
        lines.append(f"| {group} | {len(members)} | {' | '.join(cells)} | {most} |")
    print("\n".join(lines))
    num_failed = sum(row.outcome == "FAILED" for row in rows)
    print(f"{len(rows)} inputs, {num_failed} failed, {time.perf_counter() - start:.0f} s")
    write(options.output, [asdict(row) for row in rows])
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
