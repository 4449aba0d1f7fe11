"""Baselines of a gate: runs blessed into one file, and the history of what was compared with it.

A baseline is a zip of what a comparison reads of its runs, so that it can be kept in a repository or a cache
and compared by the engine that compares any two runs. The history is a line of JSON for each comparison.
"""

import re
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from aorta.account.model import Comparison, Dataset
from aorta.account.results.schema import to_json
from aorta.errors import NOT_JSON, RecordError, ReportError
from aorta.files import open_regular, read_regular, write_whole

MANIFEST, VERSION = "baseline.json", 1
KEPT = (
    "run.json",
    "rank_*_metrics.jsonl",
    "rank_*_state.jsonl",
    "rank_*_kernels.json",
    "rank_*_sites.json",
    "rank_*_dropped.json",
)
"""Of a run's folder."""
MEMBER = re.compile(
    r"\d{1,3}/(run\.json|rank_\d+_(metrics|state)\.jsonl|rank_\d+_(kernels|sites|dropped)\.json)"
)
MOST_BYTES = 2 << 30
"""Unpacked."""
MOST_HISTORY = 64 << 20


class Manifest(msgspec.Struct, frozen=True):
    version: int
    blessed_unix_ns: int
    runs: list[str]
    """Names of the folders that the runs came from."""


class HistoryLine(msgspec.Struct, frozen=True):
    """One comparison with a baseline."""

    unix_ns: int
    verdict: str
    """better, worse, same, cannot tell, not judged."""
    exit_status: int
    headline: str
    metric: str
    unit: str
    reference: float | None
    candidate: float | None
    ratio: float | None
    interval: tuple[float, float] | None
    commit: str | None
    """Of the candidate's program."""
    blessed_unix_ns: int | None
    """Which baseline it was."""
    cells: dict[str, float]
    """Of the candidate's step, mean ms by cell of the account."""


def bless(runs: Sequence[Path], file: Path) -> None:
    """Keep the runs as the baseline, whole or not at all. RecordError for what is no run, and where the file
    is there and no baseline: it is left as it is."""
    if file.exists() and not _is_baseline(file):
        raise RecordError(
            f"{file} exists and is no baseline of aorta gate: it is not overwritten; name another"
        )
    partial = file.with_name(f".{file.name}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as packed:
            manifest = Manifest(VERSION, time.time_ns(), [run.resolve().name for run in runs])
            packed.writestr(MANIFEST, to_json(manifest))
            for number, run in enumerate(runs):
                paths = sorted(path for pattern in KEPT for path in run.glob(pattern))
                if not any(path.name.endswith("_metrics.jsonl") for path in paths):
                    raise RecordError(
                        f"{run} holds no run: a baseline is the folder that `aorta run -o` wrote"
                    )
                for path in paths:
                    with open_regular(path) as source, packed.open(f"{number}/{path.name}", "w") as into:
                        while piece := source.read(1 << 20):
                            into.write(piece)
        partial.replace(file)
    except OSError as error:
        raise RecordError(f"cannot write {file}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            partial.unlink()


def _is_baseline(file: Path) -> bool:
    """True for a baseline of any version."""
    try:
        with open_regular(file) as opened, zipfile.ZipFile(opened) as packed:
            return MANIFEST in packed.namelist()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError):
        return False


@contextmanager
def baseline_runs(path: Path) -> Iterator[tuple[list[Path], Manifest | None]]:
    """Folders of the runs of a baseline for as long as the context lasts: those that a file holds, or the
    folder of a run itself. RecordError where it is neither."""
    if path.is_dir():
        yield [path], None
        return
    if not path.exists():
        raise RecordError(
            f"there is no baseline {path}: aorta gate RUN... --baseline {path} --bless makes one"
        )
    with TemporaryDirectory(prefix="aorta-baseline-") as name:
        folder = Path(name)
        try:
            with open_regular(path) as file, zipfile.ZipFile(file) as packed:
                manifest = _manifest(packed, path)
                _unpack(packed, folder, path)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as error:
            raise RecordError(f"{path} is no baseline of aorta gate: {error}") from None
        yield [folder / str(number) for number in range(len(manifest.runs))], manifest


def _manifest(packed: zipfile.ZipFile, path: Path) -> Manifest:
    try:
        with packed.open(MANIFEST) as file:
            manifest = msgspec.json.decode(file.read(1 << 20), type=Manifest)
    except (KeyError, msgspec.ValidationError, *NOT_JSON):
        raise RecordError(f"{path} is no baseline of aorta gate: it has no {MANIFEST}") from None
    if manifest.version != VERSION:
        raise RecordError(f"{path}: version {manifest.version}, this aorta reads {VERSION}: bless it anew")
    return manifest


def _unpack(packed: zipfile.ZipFile, folder: Path, path: Path) -> None:
    left = MOST_BYTES
    for name in packed.namelist():
        if name == MANIFEST:
            continue
        if MEMBER.fullmatch(name) is None:
            raise RecordError(f"{path} is no baseline of aorta gate: it holds {name[:80]!r}")
        into = folder / name
        into.parent.mkdir(exist_ok=True)
        with packed.open(name) as source, open(into, "xb") as file:
            while piece := source.read(1 << 20):
                left -= len(piece)
                if left < 0:
                    raise RecordError(f"{path} unpacks to more than {MOST_BYTES >> 30} GiB")
                file.write(piece)


# ---- history -----------------------------------------------------------------------------------


def history_line(
    comparison: Comparison, candidate: Dataset, manifest: Manifest | None, exit_status: int
) -> HistoryLine:
    main = comparison.metrics[comparison.main]
    parts = comparison.decomposition.parts if comparison.decomposition is not None else []
    return HistoryLine(
        unix_ns=time.time_ns(),
        verdict=main.verdict,
        exit_status=exit_status,
        headline=comparison.headline,
        metric=main.name,
        unit=main.unit,
        reference=main.reference,
        candidate=main.candidate,
        ratio=main.ratio,
        interval=None if main.interval is None else (main.interval.low, main.interval.high),
        commit=candidate.first.noted.versions.get("program_commit"),
        blessed_unix_ns=None if manifest is None else manifest.blessed_unix_ns,
        cells={part.name: round(part.candidate_ms, 6) for part in parts},
    )


def read_history(path: Path) -> list[HistoryLine]:
    """Oldest first; [] where there is none. ReportError for a file of something else."""
    if not path.exists():
        return []
    try:
        lines = read_regular(path, MOST_HISTORY).splitlines()
        return [msgspec.json.decode(line, type=HistoryLine) for line in lines if line.strip()]
    except (OSError, msgspec.ValidationError, *NOT_JSON) as error:
        raise ReportError(f"{path} is no history of aorta gate: {error}") from None


def write_history(path: Path, lines: Sequence[HistoryLine]) -> None:
    """Whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}") from None
