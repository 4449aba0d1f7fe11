"""Reads the files of a run: step records, run.json, names of kernels. Errors name the file and the line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from aorta.errors import NOT_JSON, RecordError
from aorta.files import open_regular, read_regular
from aorta.records.files import files_beside
from aorta.records.lines import LineReader, single_lines, version_error, version_of
from aorta.records.schema import READABLE_VERSIONS, KernelNames, RunRecord, StepRecord
from aorta.records.seal import seal_of
from aorta.records.writer import tail


class OfRun(Protocol):
    """Content of a file that says of which run it is; one of an earlier version may not."""

    @property
    def run_id(self) -> str | None: ...


Beside = TypeVar("Beside", bound=OfRun)

OP_OF_STREAM = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "aux": "other",
}
"""Collective that each of aorta's named streams carries."""


def read_steps(
    path: Path | str, notes: list[str] | None = None, *, left_out: list[str] | None = None
) -> Iterator[StepRecord]:
    """The step records of a file, one at a time.

    A last line that was cut off, as a killed process leaves it, is left out, and lines may be missing; that
    is appended to notes, or logged where no notes are given. Lines that were changed after they were written,
    are in another order or of another run raise RecordError, or are left out too
    where a list is given that tells them.
    """
    reader = LineReader(path, notes, left_out)
    for line in single_lines(path):
        record = reader.record(line)
        if record is not None:
            yield record
        if reader.is_cut_off:
            break
    reader.close()


def last_line(path: Path | str) -> bytes:
    """The last whole line of a file; b"" where it has none. Raises OSError."""
    with open_regular(path) as file:
        end = tail(file.fileno(), file.seek(0, 2))
    return end[: end.rfind(b"\n") + 1].rstrip(b"\n").rpartition(b"\n")[2]


def read_run(path: Path | str) -> RunRecord:
    """The record in run.json. path: the file or its folder."""
    path = Path(path)
    if path.is_dir():
        path = path / "run.json"
    try:
        data = read_regular(path)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error
    try:
        run = msgspec.json.decode(data, type=RunRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        version = version_of(data)
        if version is not None and version not in READABLE_VERSIONS:
            raise version_error(path, None, version) from error
        raise RecordError(f"{path} is not a run record: {error}") from error
    if run.schema not in READABLE_VERSIONS:
        raise version_error(path, None, run.schema)
    return run


def read_beside(
    path: Path | str, kind: type[Beside], run_id: str | None = None, notes: list[str] | None = None
) -> Beside | None:
    """A file beside a rank's lines. None where there is none; also where it is damaged or not of this run,
    which is then added to notes, once."""
    fault = None
    try:
        data = read_regular(path)
        found = msgspec.json.decode(data, type=kind)
        seal = seal_of(data)
        if seal is not None and not seal.is_whole:
            fault = "it was changed after it was written"
        elif run_id is not None and found.run_id not in (None, run_id):
            fault = f"it is of another run, {found.run_id}"
    except FileNotFoundError:
        return None
    except OSError as error:
        fault = error.strerror or str(error)
    except NOT_JSON:
        fault = "it is torn or damaged"
    if fault is None:
        return found
    note = f"{path} is left out: {fault}"
    if notes is not None and note not in notes:
        notes.append(note)
    return None


def read_kernel_names(
    path: Path | str, run_id: str | None = None, notes: list[str] | None = None
) -> list[str]:
    """Names that a rank's lines of kernel records refer to by index.

    Empty where read_beside has none: the lines have the kernels' classes all the same.
    """
    found = read_beside(path, KernelNames, run_id, notes)
    return [] if found is None else found.names


def kernel_names_beside(path: Path, run_id: str | None = None, notes: list[str] | None = None) -> list[str]:
    """Names that the lines at path refer to."""
    rank_files = files_beside(path)
    return [] if rank_files is None else read_kernel_names(rank_files.kernels, run_id, notes)
