"""Traces of a folder or a file, found by rank and read one rank at a time.

open_source finds them: files are told apart by their content (sniff.py), and no more of them is read than
tells the format and the rank. Source.read then reads one rank with the reader of its format; map_ranks does
so for all, in several processes.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from aorta.errors import TraceError
from aorta.processes import parallel_map, usual_jobs
from aorta.records.files import STEPS_FILE
from aorta.traces.classify import COMM_RULES, CommRule
from aorta.traces.files import read_bytes
from aorta.traces.kineto import parse_kineto
from aorta.traces.model import RANK_ASSUMED, RankTrace, rank_in_name
from aorta.traces.nsys import nsys_processes, read_nsys
from aorta.traces.rocpd import read_rocpd, rocpd_processes
from aorta.traces.rocprof import parse_rocprofv3_json, read_rocprofv3_csv
from aorta.traces.sniff import HEADERS, Content, Format, archive_members, read_member, sniff

Kind = Literal["records", "kineto", "rocprofv3", "nsys"]
KIND_OF_FORMAT: dict[str, Kind] = {
    "kineto": "kineto",
    "rocprofv3-json": "rocprofv3",
    "rocprofv3-csv": "rocprofv3",
    "rocpd": "rocprofv3",
    "nsys": "nsys",
}
KNOWN = "Kineto traces, rocprofv3 output (JSON, CSV, rocpd) or an Nsight Systems SQLite export"
CANDIDATE = re.compile(r"\.(json|json\.gz|tar|tar\.gz|tgz|db|rpd|sqlite|sqlite3|csv|csv\.gz)$", re.IGNORECASE)
CSV_NAME = re.compile(r"^(?P<capture>.*?)_?(kernel|memory_copy|(hip|hsa|rccl|marker)\w*)_trace\.csv(\.gz)?$")
RESULTS_NAME = re.compile(r"^(?P<capture>.*?)(_results)?\.(json|json\.gz|db)$")
PREFERRED: dict[str, int] = {"rocprofv3-json": 0, "rocpd": 1, "rocprofv3-csv": 2}
"""Order of preference among the formats of one capture: the first tells most."""
MOST_RANKS = 10_000_000
"""Number of a rank from which on it is taken for damage."""
MOST_WITHOUT_TRACE = 2_000
MOST_REJECTED = 100
"""Files, and files named like traces, that are looked at before the first trace: behind them the folder is
taken for no run."""
DEEPEST = 3
"""Depth of folders that are looked into below the one given: rocprofv3 writes <host>/<pid>_results.db."""
MOST_FILES = 100_000
"""Files in a folder above which it is not the folder of one run."""
Result = TypeVar("Result")


class TraceFile(msgspec.Struct, frozen=True):
    """Place of one rank's trace: a file, a member of an archive, a process of a database."""

    rank: int
    format: Format
    paths: tuple[str, ...]
    """One path, or the several files of a CSV set."""
    member: str | None = None
    """Name within an archive."""
    process: int | None = None
    """Process within a database that holds several."""
    rank_is_assumed: bool = False
    device: str | None = None
    """Device of this rank within a trace that holds several."""

    @property
    def name(self) -> str:
        return f"{self.paths[0]}:{self.member}" if self.member else self.paths[0]

    def data(self) -> bytes:
        """Content of a trace that is one file or member."""
        first = Path(self.paths[0])
        return read_member(first, self.member) if self.member else read_bytes(first)


Contents = list[tuple[TraceFile, Content]]


@dataclass(frozen=True, slots=True)
class Source:
    """Files of one run's traces, by rank. It holds names and no traces, and travels to other processes."""

    path: Path
    kind: Kind
    files: dict[int, TraceFile]
    world_size: int | None
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> list[int]:
        return sorted(self.files)

    @property
    def num_ranks(self) -> int:
        """Ranks of the run, as far as the files tell."""
        return max(self.world_size or 0, max(self.files) + 1)

    def only(self, rank: int) -> "Source":
        """This source with one rank's file alone."""
        return replace(self, files={rank: self.files[rank]})

    def by_device(self, devices: Sequence[str]) -> "Source":
        """This one trace of several devices as a source with a rank for each device, in order of numbers."""
        (file,) = self.files.values()
        files = {
            i: msgspec.structs.replace(file, rank=i, device=device, rank_is_assumed=False)
            for i, device in enumerate(sorted(devices, key=_natural))
        }
        names = ", ".join(f"rank {i} is GPU {file.device}" for i, file in files.items())
        return replace(self, files=files, notes=(f"the trace holds {len(files)} GPUs: {names}",))

    def read(
        self,
        rank: int,
        *,
        rules: Sequence[CommRule] = COMM_RULES,
    ) -> RankTrace:
        if rank not in self.files:
            raise TraceError(f"{self.path} holds no rank {rank}; it has {ranks_text(self.ranks)}")
        file = self.files[rank]
        trace = _read(file, rules)
        notes = [note for note in trace.quality.notes if note != RANK_ASSUMED]
        if file.rank_is_assumed:
            notes.append(f"the trace does not say its rank: {rank} is assumed, by the order of files")
        return replace(
            trace,
            rank=rank,
            world_size=trace.world_size or self.world_size,
            timeline=replace(trace.timeline, rank=rank),
            steps=[replace(step, rank=rank) for step in trace.steps],
            quality=msgspec.structs.replace(trace.quality, notes=tuple(notes)),
        )


def _read(file: TraceFile, rules: Sequence[CommRule]) -> RankTrace:
    """Trace of a file, by the reader of its format."""
    first = Path(file.paths[0])
    options: Any = {"rules": rules, "device_index": file.device}
    match file.format:
        case "rocprofv3-csv":
            return read_rocprofv3_csv(file.paths, rank=file.rank, **options)
        case "rocpd":
            return read_rocpd(first, process=file.process, rank=file.rank, **options)
        case "nsys":
            return read_nsys(first, process=file.process, rank=file.rank, **options)
    if file.format == "kineto":
        return parse_kineto(file.data(), file.name, **options)
    return parse_rocprofv3_json(file.data(), file.name, rank=file.rank, **options)


def recognise(path: Path | str) -> Kind:
    """Kind of what the folder or file holds; TraceError where it is nothing that is known."""
    path = Path(path)
    if is_records(path):
        return "records"
    return open_source(path).kind


def is_records(path: Path) -> bool:
    return path.is_dir() and any(STEPS_FILE.fullmatch(name) for name in _names(path))


def open_source(path: Path | str | Sequence[Path]) -> Source:
    """Files of the traces in a folder or file, or of these files, by rank: of all ranks of a run or of some.

    TraceError where formats or runs are mixed, or a rank appears twice.
    """
    files_given = [Path(path)] if isinstance(path, Path | str) else list(path)
    contents: Contents = []
    for given in files_given:
        if not given.exists():
            raise TraceError(f"there is no file or folder {given}")
        if is_records(given):
            raise TraceError(f"{given} holds step records, no traces")
        contents += _folder_contents(given) if given.is_dir() else _file_contents(given)
    path = files_given[0] if len(files_given) == 1 else files_given[0].parent
    notes: list[str] = []
    contents = _one_format_per_capture(contents, notes)
    kinds = sorted({KIND_OF_FORMAT[content.format] for _, content in contents})
    if len(kinds) > 1:
        examples = [next(f.name for f, c in contents if KIND_OF_FORMAT[c.format] == kind) for kind in kinds]
        raise TraceError(
            f"{path} mixes {' and '.join(kinds)}: {' and '.join(examples)}; keep one run in a folder"
        )
    sizes = sorted({c.world_size for _, c in contents if c.world_size is not None})
    if len(sizes) > 1:
        raise TraceError(
            f"{path} mixes runs of {' and '.join(map(str, sizes))} ranks; keep one run in a folder"
        )
    world_size = sizes[0] if sizes else None
    files = _by_rank(path, contents)
    if world_size is not None and max(files) >= world_size:
        raise TraceError(f"{path} holds rank {max(files)} of a run of {world_size} ranks")
    return Source(path, kinds[0], files, world_size, tuple(notes))


def map_ranks(
    function: Callable[[Source, int], Result],
    source: Source,
    *,
    jobs: int | None = 1,
    dask: str | None = None,
) -> Iterator[Result]:
    """Results of function(source, rank) for every rank, in order of ranks (aorta.processes.parallel_map).

    jobs: None for as many processes as pay.
    """
    if jobs is None:
        jobs = usual_jobs(path for file in source.files.values() for path in file.paths)
    items = [(source.only(rank), rank) for rank in source.ranks]
    return parallel_map(partial(_apply, function), items, jobs=jobs, dask=dask, error=TraceError)


def _apply(function: Callable[[Source, int], Result], item: tuple[Source, int]) -> Result:
    return function(*item)


def _file_contents(path: Path) -> Contents:
    """Traces in one file, and in the CSV files of the same capture."""
    content = sniff(path)
    match content.format:
        case "tar":
            return _archive(path)
        case "rocprofv3-csv":
            siblings = [p for p in path.parent.iterdir() if _capture(p) == _capture(path) and p.is_file()]
            tables = [p for p in siblings if p == path or ".csv" in p.name and CSV_NAME.match(p.name)]
            return _csv_sets([p for p in tables if sniff(p).format == "rocprofv3-csv"])
        case "records":
            raise TraceError(f"{path} belongs to step records; give the folder that it is in")
        case "drawing":
            raise TraceError(f"{path} is a drawing of a report; give the run or the traces that it shows")
        case "rocprofv3-sums" | "rocprofv3-agents":
            raise _without_times(path, content.format)
        case "json":
            raise TraceError(
                f"{path} is JSON but no trace: it has neither traceEvents nor rocprofiler-sdk-tool"
            )
        case "other":
            raise TraceError(f"{path} is not one of {KNOWN}")
    return _processes(path, content)


def _folder_contents(folder: Path) -> Contents:
    """Traces in the files of a folder and of those below it."""
    contents: Contents = []
    tables: dict[Path, list[Path]] = defaultdict(list)
    rejected: list[TraceError] = []
    faults: list[TraceError] = []
    for num_seen, path in enumerate(_walk(folder)):
        is_enough = num_seen >= MOST_WITHOUT_TRACE or len(rejected) + len(faults) >= MOST_REJECTED
        if is_enough and not contents and not tables:
            break
        if not CANDIDATE.search(path.name):
            continue
        try:
            content = sniff(path)
            if content.format == "rocprofv3-csv":
                tables[path.parent].append(path)
            elif content.format == "tar":
                contents += _archive(path)
            elif content.format in KIND_OF_FORMAT:
                contents += _processes(path, content)
            elif content.format in HEADERS:
                rejected.insert(0, _without_times(path, content.format))
            else:
                rejected.append(TraceError(f"{path} is none"))
        except TraceError as error:
            faults.append(error)
    for paths in tables.values():
        contents += _csv_sets(paths)
    if contents and faults:
        raise faults[0]
    if not contents:
        hint = f"; {[*faults, *rejected][0]}" if rejected or faults else ""
        raise TraceError(f"{folder} is no run: it holds neither rank_<n>_metrics.jsonl nor {KNOWN}{hint}")
    return contents


def _without_times(path: Path, format: Format) -> TraceError:
    """Say what rocprofv3 has to be asked for instead of a file of it that holds no times."""
    if format == "rocprofv3-agents":
        return TraceError(
            f"{path} lists devices alone: no kernel ran under rocprofv3 there, or it was not asked for"
            " --kernel-trace"
        )
    return TraceError(
        f"{path} holds rocprofv3's sums by name, and no times: ask it for --kernel-trace --memory-copy-trace"
    )


def _walk(folder: Path) -> Iterator[Path]:
    """Files of the folder, then of those below it, level by level; no hidden ones, no links to folders."""
    count = 0
    folders = [folder]
    for _ in range(DEEPEST + 1):
        below: list[Path] = []
        for place in folders:
            with suppress(OSError), os.scandir(place) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    path = Path(entry.path)
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        below.append(path)
                        continue
                    count += 1
                    if count > MOST_FILES:
                        raise TraceError(
                            f"{folder} holds more than {MOST_FILES} files: give the folder of one run"
                        )
                    if entry.is_file() or not path.exists():  # no pipes, no devices
                        yield path
        folders = below


def _archive(path: Path) -> Contents:
    return [
        (TraceFile(-1, content.format, (str(path),), member=name), content)
        for name, content in sorted(archive_members(path).items())
    ]


def _processes(path: Path, content: Content) -> Contents:
    """One entry, or one for each process of a database."""
    processes: list[int] = []
    if content.format == "rocpd":
        processes = rocpd_processes(path)
    elif content.format == "nsys":
        processes = nsys_processes(path)
    if len(processes) > 1:
        return [
            (TraceFile(-1, content.format, (str(path),), process=process), content._replace(rank=None))
            for process in processes
        ]
    rank = content.rank if content.rank is not None else rank_in_name(str(path))
    return [(TraceFile(-1, content.format, (str(path),)), content._replace(rank=rank))]


def _csv_sets(paths: list[Path]) -> Contents:
    sets: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        sets[_capture(path)].append(path)
    contents: Contents = []
    for members in sets.values():
        # The one whose name tells it is the kernels' comes first: it names the set.
        members.sort(key=lambda p: ("kernel_trace" not in p.name, p.name))
        rank = rank_in_name(str(members[0]))
        file = TraceFile(-1, "rocprofv3-csv", tuple(map(str, members)))
        contents.append((file, Content("rocprofv3-csv", rank)))
    return contents


def _capture(path: Path) -> str:
    """Start of the path that all files written by one process share."""
    match = CSV_NAME.match(path.name) or RESULTS_NAME.match(path.name)
    return str(path.parent / (match["capture"] if match else path.stem))


def _one_format_per_capture(contents: Contents, notes: list[str]) -> Contents:
    """The files without those that hold a capture a second time, in a format that tells less."""
    formats: dict[str, set[str]] = defaultdict(set)
    for file, content in contents:
        if content.format in PREFERRED and file.member is None:
            formats[_capture(Path(file.paths[0]))].add(content.format)
    formats_of = {
        capture: sorted(f, key=PREFERRED.__getitem__) for capture, f in formats.items() if len(f) > 1
    }
    for capture, names in formats_of.items():
        notes.append(f"{capture} exists as {', '.join(names)}: {names[0]} is read")
    return [
        (file, content)
        for file, content in contents
        if content.format not in PREFERRED
        or formats_of.get(_capture(Path(file.paths[0])), [content.format])[0] == content.format
    ]


def _by_rank(path: Path, contents: Contents) -> dict[int, TraceFile]:
    """Files by rank; where none says its rank, by the order of their names."""
    untold = [content.rank is None for _, content in contents]
    if any(untold) and not all(untold):
        file = contents[untold.index(True)][0]
        raise TraceError(f"{file.name} does not say its rank, while other traces of {path} do")
    assumed = all(untold)
    if assumed:
        contents = sorted(contents, key=lambda row: (_natural(row[0].paths[0]), row[0].member or ""))
    files: dict[int, TraceFile] = {}
    for i, (file, content) in enumerate(contents):
        rank = i if content.rank is None else content.rank
        if rank in files:
            raise TraceError(
                f"rank {rank} appears twice, in {files[rank].name} and {file.name};"
                " give the folder of one run and one window of time"
            )
        if not 0 <= rank < MOST_RANKS:
            raise TraceError(f"{file.name} says that it is rank {rank}")
        files[rank] = msgspec.structs.replace(file, rank=rank, rank_is_assumed=assumed)
    return dict(sorted(files.items()))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise TraceError(f"cannot read {folder}: {error.strerror}") from error


def _natural(text: str) -> list[tuple[int, str]]:
    """Key for sorting names whose numbers count as numbers: rank_10 after rank_9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", text)]


def ranks_text(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
