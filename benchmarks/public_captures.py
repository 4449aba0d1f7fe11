"""Public captures of AMD's GPUs, and public nsys exports, read by aorta and summed a second time without it.

    python benchmarks/public_captures.py CLONES            # compares, and prints a row for each capture
    python benchmarks/public_captures.py CLONES --write    # writes the independent sums into the table anew

CLONES/<owner>/<name> are clones of the repositories in results/public_captures.csv (a capture is named by its
blob, which `git clone` brings where a branch holds it). Captures that are not there are said.

The second sum uses a reader for each format that looks at names and times alone, and goes through all edges
of kernels in order of time. Communication is what has nccl or rccl in its name; all other kernels are
compute; copies count for the span alone.
"""

import argparse
import csv
import gzip
import json
import re
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from aorta.errors import AortaError
from aorta.timeline.overlap import total
from aorta.traces.sources import open_source

TABLE = Path(__file__).parent / "results" / "public_captures.csv"
COMMUNICATION = re.compile("nccl|rccl", re.IGNORECASE)
SUMS = ("num_kernels", "num_comm", "span_ms", "comm_ms", "compute_ms", "hidden_ms")
SAME_MS = 0.0015
"""Formats hold whole ns or thousandths of a us; their sums differ by roundings."""


class Work(NamedTuple):
    """One kernel or copy on a device."""

    rank: int
    name: str
    start_ns: float
    end_ns: float
    is_kernel: bool


def sums(work: list[Work]) -> dict[str, float]:
    """Sums over a device's work, by its edges in order of time."""
    kernels = [w for w in work if w.is_kernel]
    edges = []
    for kernel in kernels:
        side = 0 if COMMUNICATION.search(kernel.name) else 1
        edges += [(kernel.start_ns, 1, side), (kernel.end_ns, -1, side)]
    open_now, since, of_state = [0, 0], 0.0, dict.fromkeys((1, 2, 3), 0.0)
    for time, change, side in sorted(edges):
        state = (open_now[0] > 0) + 2 * (open_now[1] > 0)
        if state:
            of_state[state] += time - since
        open_now[side] += change
        since = time
    comm, compute, both = of_state[1], of_state[2], of_state[3]
    span = max(w.end_ns for w in work) - min(w.start_ns for w in work)
    return {
        "num_kernels": len(kernels),
        "num_comm": sum(bool(COMMUNICATION.search(kernel.name)) for kernel in kernels),
        "span_ms": span / 1e6,
        "comm_ms": (comm + both) / 1e6,
        "compute_ms": (compute + both) / 1e6,
        "hidden_ms": both / 1e6,
    }


# -- a second reader of each format --------------------------------------------------------------------


def kineto(path: Path) -> Iterator[Work]:
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start_ns = event["ts"] * 1000
            yield Work(0, event["name"], start_ns, start_ns + event["dur"] * 1000, event["cat"] == "kernel")


def rocprofv3_json(path: Path) -> Iterator[Work]:
    tool = json.loads(gzip.decompress(path.read_bytes()))["rocprofiler-sdk-tool"][0]
    names = {symbol["kernel_id"]: symbol["formatted_kernel_name"] for symbol in tool["kernel_symbols"]}
    for record in tool["buffer_records"]["kernel_dispatch"]:
        name = names[record["dispatch_info"]["kernel_id"]]
        yield Work(0, name, record["start_timestamp"], record["end_timestamp"], True)
    for record in tool["buffer_records"]["memory_copy"]:
        yield Work(0, "copy", record["start_timestamp"], record["end_timestamp"], False)


def rocprofv3_csv(path: Path) -> Iterator[Work]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            times = int(row["Start_Timestamp"]), int(row["End_Timestamp"])
            yield Work(0, row["Kernel_Name"], *times, True)


def rpd(path: Path) -> Iterator[Work]:
    query = """SELECT N.string, O.start, O.end, T.string FROM rocpd_op O, rocpd_string N, rocpd_string T
        WHERE N.id = O.description_id AND T.id = O.opType_id"""
    for name, start, end, kind in sqlite3.connect(path).execute(query):
        yield Work(0, name, start, end, kind == "KernelExecution")


def nsys(path: Path) -> Iterator[Work]:
    database = sqlite3.connect(path)
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    query = """SELECT K.deviceId, S.value, K.start, K.end FROM CUPTI_ACTIVITY_KIND_KERNEL K
        JOIN StringIds S ON S.id = coalesce(K.demangledName, K.shortName)"""
    rows = [(*row, True) for row in database.execute(query)]
    for table in {"CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"} & tables:
        rows += [
            (d, table, a, b, False)
            for d, a, b in database.execute(f"SELECT deviceId, start, end FROM {table}")
        ]
    devices = sorted({row[0] for row in rows})
    yield from (Work(devices.index(device), *row) for device, *row in rows)


def xplane(path: Path) -> Iterator[Work]:
    """JAX's XSpace: planes of devices, their lines and events (tsl/profiler/protobuf/xplane.proto)."""
    planes = {}
    for number, plane in fields(path.read_bytes()):
        parts = list(fields(plane)) if number == 1 else []
        device = re.match(rb"/device:(?:GPU|ROCM):(\d+)", next((v for n, v in parts if n == 2), b""))
        lines = [dict(fields(v)).get(2, b"") for n, v in parts if n == 3]
        if device and any(line.startswith(b"Stream #") and b"Memcpy" not in line for line in lines):
            planes[int(device[1])] = parts  # a device that only copies is no rank
    for rank, (_, parts) in enumerate(sorted(planes.items())):
        metadata = [dict(fields(entry)) for n, entry in parts if n == 4]
        names = {entry[1]: dict(fields(entry[2])).get(2, b"").decode() for entry in metadata}
        for line in (list(fields(v)) for n, v in parts if n == 3):
            if not next((v for n, v in line if n == 2), b"").startswith(b"Stream #"):
                continue
            base_ns = next((v for n, v in line if n == 3), 0)
            for event in (dict(fields(v)) for n, v in line if n == 4):
                name, start_ns = names[event[1]], base_ns + event.get(2, 0) / 1000
                is_kernel = not re.match("mem(cpy|set)", name, re.IGNORECASE)
                yield Work(rank, name, start_ns, start_ns + event.get(3, 0) / 1000, is_kernel)


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protobuf message's fields."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
        else:
            size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            yield number, data[place : place + size]
            place += size


READERS: dict[str, Callable[[Path], Iterator[Work]]] = {
    "kineto": kineto,
    "rocprofv3 json": rocprofv3_json,
    "rocprofv3 csv": rocprofv3_csv,
    "rpd": rpd,
    "nsys": nsys,
    "xplane": xplane,
}


# -- the table ------------------------------------------------------------------------------------------


def extracted(row: dict[str, str], clones: Path, folder: Path) -> Path | None:
    """The capture as a file in `folder`; None where the clone does not hold it."""
    command = ["git", "-C", str(clones / row["repository"]), "cat-file", "blob", row["blob"]]
    found = subprocess.run(command, capture_output=True, check=False)
    if found.returncode != 0 or not found.stdout:
        return None
    path = folder / Path(row["path"]).name
    path.write_bytes(found.stdout)
    return path


def read_by_aorta(path: Path, rank: int) -> dict[str, float]:
    result = total(open_source(path).read(rank).timeline)
    assert result.num_kernels is not None
    numbers: tuple[float, ...] = (result.num_kernels, result.num_collectives, result.span_ms)
    numbers += (result.comm_ms, result.compute_ms, result.hidden_ms)
    return dict(zip(SUMS, numbers, strict=True))


def verdict(row: dict[str, str], path: Path) -> str:
    try:
        ours = read_by_aorta(path, int(row["rank"]))
    except AortaError as error:
        return f"not read: {error}"
    differing = [
        f"{name} {ours[name]:.3f} not {float(row[name]):.3f}"
        for name in SUMS
        if abs(ours[name] - float(row[name])) > (SAME_MS if name.endswith("_ms") else 0)
    ]
    return ", ".join(differing) or "the same"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("clones", type=Path)
    parser.add_argument("--write", action="store_true", help="write the independent sums into the table")
    options = parser.parse_args()
    with TABLE.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    num_same = num_absent = 0
    for row in rows:
        with tempfile.TemporaryDirectory() as folder:
            path = extracted(row, options.clones, Path(folder))
            if path is None:
                num_absent += 1
                print(f"{row['repository']} {row['path']}: not in the clone")
                continue
            if options.write:
                work = [w for w in READERS[row["format"]](path) if w.rank == int(row["rank"])]
                row |= {k: v if k.startswith("num") else f"{v:.4f}" for k, v in sums(work).items()}
            told = verdict(row, path)
        num_same += told == "the same"
        kernels = f"{row['num_kernels']:>6} kernels  {row['num_comm']:>5} comm"
        times = f"{float(row['comm_ms']):9.3f} ms  {float(row['compute_ms']):9.3f} ms"
        place = f"{row['repository']}: {Path(row['path']).name}"
        print(f"{row['format']:14}  {row['device']:9}  {kernels}  {times}  {told}  {place}")
    if options.write:
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    num_read = len(rows) - num_absent
    print(f"{num_same} of {num_read} captures have the same sums; {num_absent} of {len(rows)} were not there")
    return 0 if num_same == num_read else 1


if __name__ == "__main__":
    raise SystemExit(main())
