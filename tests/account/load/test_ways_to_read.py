"""Numbers are the same whichever way a run is read: line by line, in blocks, from columns, through files."""

import errno
import re

import msgspec
import pytest

from aorta import processes as parallel_map
from aorta.account.judge.judged import dataset, judge
from aorta.account.judge.summary import summary
from aorta.account.load import arrays, assemble, open
from aorta.account.load.open import load_run
from aorta.account.load.rank import reduce
from aorta.errors import AortaError
from aorta.records import columns
from aorta.records.rotation import DROPPED
from aorta.records.schema import DeviceRecord, HostSpan, MemoryRecord
from aorta.records.seal import sealed
from tests.account.reports_in_memory import records_of
from tests.records.run_folders import run_record, write_run

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
    bodies[0] = bodies[0][:-1] + b"," + gap + b"}"
    path.write_bytes(b"".join(sealed(body, number) for number, body in enumerate(bodies, start=10)))


def damaged(path):
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"tokens":1', b'"tokens":2', 1))


def removed(path):
    path.unlink()


SPOILT = (cut_off, without_a_line, unsealed, rotated, damaged, removed)
"""Of such lines no columns are made."""


def line_by_line(path):
    notes = []
    reduced = reduce.reduce_records(path, reduce.with_unwritten(path, notes))
    reduced.notes = notes
    return reduced


@pytest.fixture
def in_files(tmp_path, monkeypatch):
    """Numbers of runs of any size are in a file."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("AORTA_CACHE_DIR", str(folder))
    monkeypatch.setattr(assemble, "MOST_IN_MEMORY", 0)
    return folder


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
def test_every_way_to_read_a_run_gives_the_same_numbers(tmp_path, in_files, monkeypatch, change, damage):
    folder = written(tmp_path / "run", change, damage)
    in_file = numbers(folder)
    assert list(in_files.iterdir()) == []
    monkeypatch.undo()
    in_memory = numbers(folder)
    monkeypatch.setattr(columns, "MOST_LINES", 16)
    for path in folder.glob("rank_*_metrics.jsonl"):
        of_lines = columns.ColumnsWriter(path)
        for line in path.read_bytes().splitlines(keepends=True):
            of_lines.add(len(line))
        of_lines.close()
        assert path.with_name(path.name.replace("metrics.jsonl", "columns.arrow")).exists() == (
            damage not in SPOILT or path.name != "rank_1_metrics.jsonl"
        )
    from_columns = numbers(folder)
    monkeypatch.setattr(open, "reduce_file", line_by_line)
    assert numbers(folder) == in_memory == from_columns == in_file
    assert (damage in (damaged, removed)) == isinstance(in_memory, str)


def test_a_full_disk_is_one_line(tmp_path, in_files, monkeypatch):
    def pwrite(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(arrays.os, "pwrite", pwrite)
    assert re.fullmatch(r"cannot keep .*: No space left on device; .*", numbers(written(tmp_path / "run")))
    assert list(in_files.iterdir()) == []


def test_without_a_folder_of_ones_own_the_systems_is_used(tmp_path, in_files, monkeypatch):
    folder = written(tmp_path / "run")
    first = numbers(folder)
    monkeypatch.setenv("AORTA_CACHE_DIR", str(folder / "run.json"))  # a file, below which nothing can be
    assert numbers(folder) == first


@pytest.mark.processes
@pytest.mark.heavy
def test_a_dask_cluster_that_spills_gives_the_same_numbers(tmp_path, monkeypatch):
    """Workers that may keep next to nothing write the results that wait for their turn to their disk."""
    distributed = pytest.importorskip("distributed", reason="needs dask.distributed (extra dask)")
    import dask

    folder = written(tmp_path / "run")
    spilled = []
    results = parallel_map._results

    def watched(submit, items, ahead):
        for result in results(submit, items, ahead):
            spilled.extend(tmp_path.rglob("storage/*"))
            yield result

    monkeypatch.setattr(parallel_map, "_results", watched)
    first = numbers(folder)
    with (
        dask.config.set(
            {"distributed.worker.memory.target": 1e-9, "temporary-directory": str(tmp_path / "spilled")}
        ),
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
    ):
        assert numbers(folder, dask=cluster.scheduler_address) == first
    assert spilled
