"""Reads rocprofv3's CSV output: the files <prefix>_kernel_trace.csv, _memory_copy_trace.csv,
_hip_api_trace.csv, _rccl_api_trace.csv, _marker_api_trace.csv of one process.

Which file is which is told by its header, and columns by their names: both grew between versions.
The sizes of collectives and copies are not in these files. Checked only on files made by the tests
after the tool's documentation.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aorta.errors import TraceError
from aorta.processes import no_garbage_collection
from aorta.traces.assemble import Activities, Category, Ints, assemble, indexed, nanoseconds
from aorta.traces.classify import COMM_RULES, CommRule, classifier
from aorta.traces.files.inflate import read_bytes
from aorta.traces.host_calls import CollectiveCalls, HostCall, HostCalls, link, step_marks
from aorta.traces.model import RankTrace
from aorta.traces.rocprof.rocm import BOOT_CLOCK, dispatch_gaps, finish, stream_labels

TIMES = frozenset(("Start_Timestamp", "End_Timestamp"))
LONGEST_FIELD = 1 << 24


class CsvTable(NamedTuple):
    location: str
    columns: dict[str, int]
    rows: list[list[str]]

    def texts(self, *names: str, missing: str = "") -> list[str]:
        """The first of these columns that the file has."""
        for name in names:
            if name in self.columns:
                i = self.columns[name]
                return [row[i] for row in self.rows]
        return [missing] * len(self.rows)

    def numbers(self, name: str) -> list[int]:
        try:
            return [int(text) if text else 0 for text in self.texts(name)]
        except ValueError as error:
            raise TraceError(f"{self.location}: column {name} holds no whole number: {error}") from error

    def times(self, name: str) -> Ints:
        return nanoseconds(self.numbers(name), self.location)


def kind_of_header(header: Sequence[str]) -> str | None:
    """kernel, copy or api; None where the table is none of rocprofv3's traces."""
    columns = set(header)
    if not columns >= TIMES:
        return None
    if "Kernel_Name" in columns:
        return "kernel"
    if columns >= {"Domain", "Function"}:
        return "api"
    return "copy" if "Direction" in columns else None


def read_rocprofv3_csv(
    paths: Iterable[Path | str],
    *,
    rules: Sequence[CommRule] = COMM_RULES,
    device_index: str | None = None,
    rank: int | None = None,
) -> RankTrace:
    """The trace of the files of one process. rank is used where no file's name tells one."""
    with no_garbage_collection():
        tables: dict[str, list[CsvTable]] = {"kernel": [], "copy": [], "api": []}
        location = ""
        for path in sorted(map(str, paths)):
            table, kind = _read(path)
            if kind is not None:
                tables[kind].append(table)
                location = path if kind == "kernel" or not location else location
        if not tables["kernel"] and not tables["copy"]:
            raise TraceError(f"{location or 'the CSV set'} has no kernel_trace: was --kernel-trace given?")
        work, calls = _columns(tables, location)
        return assemble(
            work,
            location,
            classifier(tuple(rules)),
            source="rocprofv3",
            device=None,
            device_index=device_index,
            **finish(work, calls, location, rank),
        )


def _read(path: str) -> tuple[CsvTable, str | None]:
    data = read_bytes(path)
    csv.field_size_limit(LONGEST_FIELD)
    try:
        reader = csv.reader(data.decode("utf-8", "replace").splitlines(keepends=True), strict=True)
        header = next(reader, [])
        rows = [row for row in reader if row]
    except csv.Error as error:
        raise TraceError(f"{path} is damaged CSV: {error}") from error
    kind = kind_of_header(header)
    if kind is not None:
        ragged = next((i for i, row in enumerate(rows, start=2) if len(row) != len(header)), None)
        if ragged is not None:
            raise TraceError(f"{path}: line {ragged} has {len(rows[ragged - 2])} columns, not {len(header)}")
    return CsvTable(path, {name: i for i, name in enumerate(header)}, rows), kind


def _columns(tables: dict[str, list[CsvTable]], location: str) -> tuple[Activities, CollectiveCalls]:
    kernels, copies, apis = tables["kernel"], tables["copy"], tables["api"]
    device = [text for t in kernels for text in t.texts("Agent_Id")]
    device += [text for t in copies for text in _copy_device(t)]
    work_tables = [*kernels, *copies]
    streams, stream = stream_labels(
        device,
        [text or None for t in work_tables for text in t.texts("Stream_Id")],
        [f"queue {text}" for t in kernels for text in t.texts("Queue_Id")]
        + ["copies" for t in copies for _ in t.rows],
    )
    names, name = indexed(
        [text or "unnamed" for t in kernels for text in t.texts("Kernel_Name")]
        + [text or "copy" for t in copies for text in t.texts("Direction")]
    )
    correlation = [number for t in work_tables for number in t.numbers("Correlation_Id")]
    rows = [row for t in apis for row in _api_rows(t)]
    links = link(
        nanoseconds(correlation, location),
        HostCalls.from_rows(
            [(c, start, thread, f) for domain, f, c, start, _, thread in rows if "MARKER" not in domain]
        ),
    )
    collectives = CollectiveCalls(
        HostCall(function, start, end, thread, {})
        for domain, function, _, start, end, thread in rows
        if "RCCL" in domain
    )
    work = Activities(
        start_ns=np.concatenate([t.times("Start_Timestamp") for t in work_tables]),
        end_ns=np.concatenate([t.times("End_Timestamp") for t in work_tables]),
        category=np.array(
            [int(Category.KERNEL) for t in kernels for _ in t.rows]
            + [int(category) for t in copies for category in _copy_categories(t)],
            dtype=np.int8,
        ),
        name=name,
        names=names,
        stream=stream,
        streams=streams,
        launch_ns=links.launch_ns,
        correlation=correlation,
        info=collectives.information(links),
        marks=step_marks((f, 0, start, end) for d, f, _, start, end, _ in rows if "MARKER" in d),
        num_launches=links.num_launches,
        dropped_ns=links.dropped_ns,
        num_missing_dispatches=dispatch_gaps(
            [n for t in kernels for n in t.numbers("Dispatch_Id")], location
        ),
        notes=[BOOT_CLOCK],
    )
    return work, collectives


def _api_rows(table: CsvTable) -> Iterable[tuple[str, str, int, int, int, int]]:
    """Domain, function, correlation, start, end, thread."""
    return zip(
        table.texts("Domain"),
        table.texts("Function"),
        nanoseconds(table.numbers("Correlation_Id"), table.location).tolist(),
        table.times("Start_Timestamp").tolist(),
        table.times("End_Timestamp").tolist(),
        nanoseconds(table.numbers("Thread_Id"), table.location).tolist(),
        strict=True,
    )


def _copy_device(table: CsvTable) -> list[str]:
    """The device of a copy: where it goes, or where it comes from if it goes to the host."""
    to_host = ["DEVICE_TO_HOST" in text.upper() for text in table.texts("Direction")]
    ends = zip(to_host, table.texts("Source_Agent_Id"), table.texts("Destination_Agent_Id"), strict=True)
    return [source if host else destination for host, source, destination in ends]


def _copy_categories(table: CsvTable) -> list[Category]:
    rows = zip(
        table.texts("Direction"),
        table.texts("Source_Agent_Id"),
        table.texts("Destination_Agent_Id"),
        strict=True,
    )
    return [
        Category.PEER_COPY if "DEVICE_TO_DEVICE" in text.upper() and source != destination else Category.COPY
        for text, source, destination in rows
    ]
