"""Two ranks and three steps, small enough to work every number out by hand."""

import json

import pytest

from aorta.page.table import dataset_table
from aorta.page.write import Outputs, make_report, write_report
from aorta.records.schema import CollectiveRecord
from aorta.timeline.types import Kind, Span, Timeline
from tests.records.run_folders import run_record, step_record, write_run

ALONE = Outputs(page=False, perfetto=False, parquet=False)
TWO_HOURS_NS = 7_200_000_000_000


@pytest.fixture
def folder(tmp_path):
    """Steps of 10, 12 and 20 ms. Rank 0 computes until 6 and gathers 5 to 9; rank 1, whose clock is two
    hours ahead, computes until 7 and gathers 7 to 9."""
    records = []
    for step, length in enumerate((10.0, 12.0, 20.0)):
        for rank, compute, start in ((0, 6.0, 5.0), (1, 7.0, 7.0)):
            spans = [Span(0, compute, Kind.COMPUTE), Span(start, 9, Kind.COMM, "all_gather", "nccl")]
            line = Timeline.from_spans(
                spans, (0.0, length), rank=rank, step=step, source="events",
                origin_unix_ns=10**18 + step * 10**9 + rank * TWO_HOURS_NS,
            )  # fmt: skip
            row = CollectiveRecord(
                op="all_gather", stream="allgather", group="dp", ranks=[0, 1], bytes=4_000_000,
                dtype="bfloat16", seq=step, start_ms=start, end_ms=9.0, algbw_gb_s=1.0, busbw_gb_s=0.5,
            )  # fmt: skip
            records.append(step_record(line, 2, collectives=[row], num_collectives=1))
    return write_run(tmp_path / "run", records, run_record(2))


def test_every_statistic_is_the_one_worked_out_by_hand(folder, tmp_path):
    write_report([folder], ["a"], tmp_path / "out", warmup=0, outputs=ALONE)
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["datasets"]["a"]
    by_hand = {  # median over ranks of medians over steps, of 95th percentiles, least and greatest rank
        "step_ms": (12.0, 19.2, 12.0, 12.0),
        "compute_ms": (6.5, 6.5, 6.0, 7.0),
        "comm_ms": (3.0, 3.0, 2.0, 4.0),
        "hidden_ms": (0.5, 0.5, 0.0, 1.0),
        "exposed_ms": (2.5, 2.5, 2.0, 3.0),
        "idle_ms": (3.0, 10.2, 3.0, 3.0),
        "overlap_ratio": (0.125, 0.125, 0.0, 0.25),
        "exposed_wait_ms": (0.5, 0.5, 0.0, 1.0),  # rank 0 waits from 5 to 7, under compute until 6
        "exposed_transfer_ms": (2.0, 2.0, 2.0, 2.0),
        "wait_ms.all_gather": (1.0, 1.0, 0.0, 2.0),
        "transfer_ms.all_gather": (2.0, 2.0, 2.0, 2.0),
        "duration_ms.all_gather": (3.0, 3.0, 2.0, 4.0),
        "busbw_gb_s.all_gather": (1.0, 1.0, 1.0, 1.0),  # 4 MB in 2 ms, half of it for two ranks
    }
    for name, numbers in by_hand.items():
        assert tuple(found["steps"][name].values()) == pytest.approx(numbers), name
    assert found["ranks"]["0"]["total"]["exposed_ms"] == pytest.approx(9.0)
    assert found["ranks"]["1"]["total"]["idle_ms"] == pytest.approx(15.0)
    assert "3 collectives were matched across ranks" in " ".join(found["notes"])
    assert "after an offset of 7,200,000 ms was corrected" in " ".join(found["notes"])


def test_the_terminal_tells_what_is_waiting(folder):
    found = make_report([folder], ["a"], warmup=0).datasets["a"]
    print(dataset_table(found))
    (waiting,) = [line for line in dataset_table(found).splitlines() if line.startswith("waiting for ranks ")]
    assert "0.500 ms" in waiting
