"""Numbers are the same whichever way a run is read: line by line, in blocks, from columns, from a file."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from aorta import processes as parallel_map
from aorta.account.judge.judged import dataset, judge
from aorta.account.judge.summary import summary
from aorta.account.load import arrays, attempts, open, run, sides
from aorta.account.load.open import load_run
from aorta.account.load.rank import cache, reduce, stored
from aorta.errors import AortaError
from aorta.records.rotation import DROPPED
from aorta.records.schema import DeviceRecord, HostSpan, MemoryRecord
from aorta.records.seal import sealed
from aorta.traces.cache import Reading
from tests.account.reports_in_memory import records_of
from tests.records.run_folders import run_record, write_run

UNCACHED = Reading(cache=False)
SHORT = dict(active_segments=None, collectives=None)


def records_of_run(num_steps=40, **changes):
    """By rank; one step in four keeps its details."""
    by_rank = records_of(num_steps=num_steps, num_ranks=3, run_id="r", **changes)
    return {
        rank: [
            line
            if i % 4 == 0
            else msgspec.structs.replace(line, **SHORT, not_measured={"segments": "left out"})
            for i, line in enumerate(lines)
        ]
        for rank, lines in by_rank.items()
    }


def plain(by_rank):
    return by_rank


def with_telemetry(by_rank):
    device = DeviceRecord(sample_unix_ns=5, power_w=500.0, throttling=["thermal"], memory_used_bytes=7)
    memory = MemoryRecord(allocated_bytes=1, reserved_bytes=2, peak_allocated_bytes=3, num_alloc_retries=1)
    spans = [HostSpan("data", 0.5, 1.5), HostSpan("optimizer", 3.0, 4.0, "Adam", 1 << 20)]
    for lines in by_rank.values():
        for i, line in enumerate(lines):
            parts = dict(device=device if i % 3 else None, memory=memory if i % 2 else None)
            lines[i] = msgspec.structs.replace(line, **parts, host_spans=spans if i % 5 else [])
    return by_rank


def with_a_second_attempt(by_rank):
    """Steps 30 to 39 were done once more."""
    for lines in by_rank.values():
        lines += [
            msgspec.structs.replace(line, attempt=1, loss=2.0, between_steps_ms=0.25) for line in lines[30:]
        ]
    return by_rank


def with_two_sources(by_rank):
    for rank, lines in by_rank.items():
        by_rank[rank] = [
            msgspec.structs.replace(line, source="host" if i % 5 == 4 else "events")
            for i, line in enumerate(lines)
        ]
    return by_rank


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-40])


def without_a_line(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:7] + lines[8:]))


def unsealed(path):
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"".join(line[: line.rindex(b',"line":')] + b"}\n" for line in lines))


def rotated(path):
    lines = path.read_bytes().splitlines()[10:]
    gap = f'"gap":"{DROPPED} to keep the file small"'.encode()
    bodies = [line[: line.rindex(b',"line":')] + b"}" for line in lines]
    bodies[0] = bodies[0].replace(b'"gap":null', gap)
    path.write_bytes(b"".join(sealed(body, number) for number, body in enumerate(bodies, start=10)))


def damaged(path):
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"tokens":1', b'"tokens":2', 1))


def removed(path):
    path.unlink()


def line_by_line(path):
    notes = []
    reduced = reduce.reduce_records(path, reduce.with_unwritten(path, notes))
    reduced.notes = notes
    return reduced


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Columns are kept of runs of any size and age."""
    monkeypatch.setenv("AORTA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "LEAST_BYTES", 0)
    monkeypatch.setattr(cache, "YOUNGEST_S", -1.0)
    return tmp_path / "cache" / "records"


def numbers(path, **options):
    """summary.json, or the error, and arrays that it does not show."""
    try:
        loaded = load_run(path, "run", **options)
    except AortaError as error:
        return str(error)
    host = {name: values.tolist() for name, values in loaded.host_parts.items()}
    of_host = msgspec.json.encode([host, loaded.start_unix_ns.tolist(), loaded.host_bound.tolist()])
    return msgspec.json.encode(summary([dataset("run", [judge(loaded)])], None)) + of_host


def written(folder, change=plain, damage=None, **changes):
    by_rank = change(records_of_run(**changes))
    write_run(folder, [line for lines in by_rank.values() for line in lines], run_record(3, run_id="r"))
    if damage is not None:
        damage(folder / "rank_1_metrics.jsonl")
    return folder


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("change", "damage"),
    [
        *((plain, damage) for damage in (None, cut_off, without_a_line, unsealed, rotated, damaged, removed)),
        *((change, None) for change in (with_telemetry, with_a_second_attempt, with_two_sources)),
        (with_a_second_attempt, without_a_line),
    ],
    ids=lambda function: function.__name__ if function else "whole",
)
def test_every_way_to_read_a_run_gives_the_same_numbers(tmp_path, kept, monkeypatch, change, damage):
    folder = written(tmp_path / "run", change, damage)
    first, again = numbers(folder), numbers(folder)
    uncached = numbers(folder, reading=UNCACHED)
    for module in (arrays, run, sides):
        monkeypatch.setattr(module, "MOST_IN_MEMORY", 0, raising=False)
    in_file = numbers(folder)
    monkeypatch.undo()
    in_blocks = numbers(folder)
    monkeypatch.setattr(open, "reduce_file", line_by_line)
    assert numbers(folder) == in_blocks == first == again == uncached == in_file
    assert (damage in (damaged, removed)) == isinstance(first, str)


def columns_of(kept):
    return sorted(path.name for path in kept.rglob("*") if path.is_file())


def test_columns_are_written_once_and_read_then(tmp_path, kept, monkeypatch):
    folder = written(tmp_path / "run")
    first = numbers(folder)
    assert columns_of(kept) == [f"rank_{rank}_metrics.jsonl.arrow" for rank in range(3)]
    monkeypatch.setattr(cache, "reduce_file", None)
    assert numbers(folder) == first


@pytest.mark.parametrize("restore_time", [False, True])
def test_columns_of_lines_that_changed_are_made_again(tmp_path, kept, restore_time):
    folder = written(tmp_path / "run")
    before = numbers(folder)
    for rank in range(3):
        path = folder / f"rank_{rank}_metrics.jsonl"
        state = path.stat()
        lines = path.read_bytes().splitlines()
        bodies = [line[: line.rindex(b',"line":')] + b"}" for line in lines]
        bodies = [body.replace(b'"tokens":1', b'"tokens":3') for body in bodies]
        with path.open("r+b") as file:  # the same file, of the same size
            file.write(b"".join(sealed(body, number) for number, body in enumerate(bodies)))
        assert path.stat().st_size == state.st_size
        if restore_time:
            os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert numbers(folder) == numbers(folder, reading=UNCACHED) != before


@pytest.mark.parametrize("data", [b"", b"ARROW1", b"\0" * 4096, None], ids=["empty", "head", "zeros", "half"])
def test_damaged_columns_are_made_again(tmp_path, kept, data):
    folder = written(tmp_path / "run")
    first = numbers(folder)
    path = next(kept.rglob("rank_1*"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if data is None else data)
    assert numbers(folder) == first


def test_columns_of_another_version_are_not_used(tmp_path, kept, monkeypatch):
    folder = written(tmp_path / "run")
    first = numbers(folder)
    monkeypatch.setattr(cache, "__version__", "another")
    seen = []
    monkeypatch.setattr(cache, "reduce_file", lambda path: seen.append(path) or reduce.reduce_file(path))
    assert numbers(folder) == first
    assert len(seen) == 3


def test_columns_that_vanish_while_they_are_used_are_read_from_the_lines(tmp_path, kept, monkeypatch):
    folder = written(tmp_path / "run")
    first = numbers(folder)
    with_notes = attempts._history

    def history(ranks):
        for path in kept.rglob("*.arrow"):
            path.unlink()
        return with_notes(ranks)

    monkeypatch.setattr(attempts, "_history", history)
    assert numbers(folder) == first


def test_a_full_disk_leaves_nothing_and_the_numbers_are_there(tmp_path, kept, monkeypatch):
    folder = written(tmp_path / "run")

    def write(file, rank, key):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stored, "write_columns", write)
    assert numbers(folder) == numbers(folder, reading=UNCACHED)
    assert columns_of(kept) == []


def test_without_a_cache_folder_nothing_is_kept(tmp_path, kept, monkeypatch):
    folder = written(tmp_path / "run")
    monkeypatch.setenv("AORTA_CACHE_DIR", str(folder / "run.json"))  # a file, below which nothing can be
    assert numbers(folder) == numbers(folder, reading=UNCACHED)
    assert columns_of(kept) == []


def test_a_run_that_is_being_written_is_not_kept(tmp_path, kept, monkeypatch):
    monkeypatch.setattr(cache, "YOUNGEST_S", 60.0)
    numbers(written(tmp_path / "run"))
    assert columns_of(kept) == []


def test_two_readers_at_once(tmp_path, kept):
    folder = written(tmp_path / "run")
    with ThreadPoolExecutor(4) as pool:
        texts = set(pool.map(lambda _: numbers(folder), range(8)))
    assert len(texts) == 1
    assert len(columns_of(kept)) == 3


def test_the_oldest_columns_go_first(tmp_path, kept, monkeypatch):
    for i, name in enumerate(("old", "new")):
        numbers(written(tmp_path / name))
        for path in kept.rglob("*.arrow"):
            os.utime(path, (1000 * (i + 1), 1000 * (i + 1))) if i == 0 else None
    left = {path for path in kept.rglob("*.arrow") if path.stat().st_mtime > 10_000}
    monkeypatch.setattr(cache, "LARGEST_CACHE_BYTES", sum(path.stat().st_size for path in left))
    cache._make_room()
    assert set(kept.rglob("*.arrow")) == left


@pytest.mark.processes
@pytest.mark.heavy
def test_a_local_dask_cluster_that_spills_gives_the_same_numbers(tmp_path, kept, monkeypatch):
    """Workers that may keep next to nothing write the results that wait for their turn to their disk."""
    pytest.importorskip("distributed")
    import dask

    folder = written(tmp_path / "run")
    for path in folder.glob("rank_*_metrics.jsonl"):
        os.utime(path, (1000, 1000))  # the workers' limit of age is the usual one
    spilled = []
    results = parallel_map._results

    def watched(submit, items, ahead):
        for result in results(submit, items, ahead):
            spilled.extend(tmp_path.rglob("storage/*"))
            yield result

    monkeypatch.setattr(parallel_map, "_results", watched)
    first = numbers(folder, reading=UNCACHED)
    with dask.config.set(
        {"distributed.worker.memory.target": 1e-9, "temporary-directory": str(tmp_path / "spilled")}
    ):
        assert numbers(folder, dask="local") == first
    assert spilled
    assert columns_of(kept) == [f"rank_{rank}_metrics.jsonl.arrow" for rank in range(3)]


@pytest.mark.parametrize("address", ["local:0", "local:two"])
def test_a_local_cluster_of_no_workers_is_refused(tmp_path, address):
    pytest.importorskip("distributed")
    assert "workers" in numbers(written(tmp_path / "run"), dask=address)
