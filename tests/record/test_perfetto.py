"""Perfetto's own view of the traces of the profiler, of a GPU run and of the report."""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aorta.config.structs import ProfilingConfig
from aorta.record.profiler import ProfilerWindow
from aorta.records.perfetto import write_perfetto
from aorta.records.reader import read_steps
from aorta.timeline.types import COPY, Kind
from aorta.traces.kineto import read_kineto
from tests.larger_data import TRACES, needs_data
from tests.record.perfetto_ui import Opened, Perfetto, absent, perfetto

pytestmark = pytest.mark.skipif(absent() is not None, reason=str(absent()))

EXAMPLE = Path(__file__).parents[2] / "docs" / "example" / "fsdp"
H200 = TRACES / "h200_fsdp4_rank0.json.gz"
PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
BY_TRACK = """select process.name, thread.name, count(*), sum(slice.dur) from slice
    join thread_track on slice.track_id = thread_track.id join thread using (utid)
    left join process using (upid) {where} group by 1, 2"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Perfetto]:
    with perfetto(tmp_path_factory.mktemp("profile")) as running:
        yield running


def tracks(opened: Opened, where: str = "") -> dict[tuple[str, str], tuple[int, float]]:
    """Slices and their summed ms by process and thread."""
    rows = opened.sql(BY_TRACK.format(where=where))
    return {(process, thread.strip()): (num, ns / 1e6) for process, thread, num, ns in rows}


def test_every_event_of_a_profiled_window_is_there(page: Perfetto, tmp_path: Path) -> None:
    settings = ProfilingConfig(enabled=True, wait=0, warmup=1, active=2, repeat=1)
    with ProfilerWindow(settings, tmp_path, rank=3) as window:
        for step in range(4):
            with torch.profiler.record_function(f"global_step_{step}"):
                torch.ones(64, 64).matmul(torch.ones(64, 64)).sum()
            window.step(step)
    (trace,) = (tmp_path / "torch_profiler" / "rank3").glob("trace_rank3_cycle0.json")
    wanted: Counter[str] = Counter()
    for event in json.loads(trace.read_bytes())["traceEvents"]:
        wanted[event["name"]] += event["ph"] in "Xi"

    opened = page.open(trace)

    assert opened.sql(PROBLEMS) == []
    found = {str(name): num for name, num in opened.sql("select name, count(*) from slice group by name")}
    assert found == {name: num for name, num in wanted.items() if num}
    assert found["global_step_1"] == found["global_step_2"] == 1


@needs_data(H200)
def test_kernels_of_a_gpu_are_those_that_aorta_reads(page: Perfetto) -> None:
    timeline = read_kineto(H200).timeline
    wanted: dict[str, list[float]] = defaultdict(list)
    for i in range(len(timeline.start_ms)):
        stream = timeline.streams[timeline.stream[i]]
        wanted[f"stream {stream}"].append(timeline.end_ms[i] - timeline.start_ms[i])

    opened = page.open(H200)

    assert opened.sql(PROBLEMS) == []
    found = tracks(opened, "where category in ('kernel', 'gpu_memcpy', 'gpu_memset')")
    assert {thread: num for (_, thread), (num, _) in found.items()} == {
        stream: len(durations_ms) for stream, durations_ms in wanted.items()
    }
    for (_, thread), (_, busy_ms) in found.items():
        assert busy_ms == pytest.approx(sum(wanted[thread]), abs=1e-3 * len(wanted[thread]))
    num_nccl = opened.sql("select count(*) from slice where category = 'kernel' and name glob 'nccl*'")
    assert num_nccl == [[int((timeline.kind == Kind.COMM).sum())]]


def test_exported_step_records_keep_their_numbers(page: Perfetto, tmp_path: Path) -> None:
    records = [record for rank in (0, 1) for record in read_steps(EXAMPLE / f"rank_{rank}_metrics.jsonl", [])]
    trace = tmp_path / "run.perfetto.json.gz"
    write_perfetto(trace, "run", records)
    num_events = Counter(
        event["ph"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    )

    opened = page.open(trace)

    assert opened.sql(PROBLEMS) == []
    found = tracks(opened)
    assert sum(num for num, _ in found.values()) == num_events["X"]
    assert opened.sql("select count(*) from counter") == [[num_events["C"]]]
    main_threads = (
        "select process.name, thread.name from thread join process using (upid) "
        "where is_main_thread and pid != 0"  # which is Perfetto's own idle process
    )
    assert sorted(opened.sql(main_threads)) == [[f"rank {rank} (run)", "steps"] for rank in (0, 1)]
    for rank in (0, 1):
        own: list[Any] = [record for record in records if record.rank == rank]
        process = f"rank {rank} (run)"
        num_steps, steps_ms = found[process, "steps"]
        assert num_steps == len(own)
        assert steps_ms == pytest.approx(sum(r.step_ms for r in own), abs=1e-3)
        num_collectives = sum(len(r.collectives or ()) for r in own)
        rows = [value for (name, thread), value in found.items() if name == process and thread[:4] == "coll"]
        assert sum(num for num, _ in rows) == num_collectives
        detailed = [r for r in own if r.active_segments is not None]
        names = ("exposed comm", "compute", "compute + comm (hidden)")
        for name, wanted_ms in zip(names, sums_of_segments(detailed), strict=True):
            (row,) = opened.sql(
                "select ifnull(sum(slice.dur), 0) from slice join thread_track on track_id = thread_track.id "
                "join thread using (utid) join process using (upid) "
                f"where process.name = '{process}' and thread.name = 'overlap' and slice.name = '{name}'"
            )
            assert row[0] / 1e6 == pytest.approx(wanted_ms, abs=1e-2)


def sums_of_segments(records: list[Any]) -> tuple[float, float, float]:
    """Exposed, compute alone, hidden, in ms."""
    exposed_ms = compute_ms = hidden_ms = 0.0
    for record in records:
        for segment in record.active_segments:
            length_ms = min(segment.end_ms, record.step_ms) - max(segment.start_ms, 0.0)
            computes = "compute" in segment.active_streams
            communicates = bool(set(segment.active_streams) - {"compute", COPY})
            exposed_ms += length_ms * (communicates and not computes)
            compute_ms += length_ms * (computes and not communicates)
            hidden_ms += length_ms * (computes and communicates)
    return exposed_ms, compute_ms, hidden_ms
