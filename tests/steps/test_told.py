"""A line without details has what differs from the lines before it, and readers know the rest."""

import json

import msgspec
import numpy as np
import pytest

from aorta.account.load.open import load_run
from aorta.records.blocks import read_blocks
from aorta.records.reader import read_steps
from aorta.records.schema import DeviceRecord, HostSpan, KernelSums, MemoryRecord
from aorta.records.writer import RunFolder
from aorta.steps.record import partial_record
from aorta.steps.told import Told
from aorta.timeline.types import OverlapRecord, StreamUse

MEMORY = MemoryRecord(allocated_bytes=5, reserved_bytes=9, peak_allocated_bytes=7, num_alloc_retries=0)
MORE = msgspec.structs.replace(MEMORY, reserved_bytes=11, num_alloc_retries=2)
SAMPLES = [DeviceRecord(sample_unix_ns=1, power_w=100.0, throttling=["heat"]),
           DeviceRecord(sample_unix_ns=2, power_w=300.0, throttling=[])]  # fmt: skip


def record(step, detailed, sample=0, memory=MEMORY, left_out=False, reasons=None):
    overlap = OverlapRecord(
        comm_ms=4.0, compute_ms=8.0, hidden_ms=3.0, exposed_ms=1.0, idle_ms=1.0,
        overlap_ratio=0.75, hidden_per_compute=0.375, compute_allreduce_ms=3.0, compute_reducescatter_ms=0.0,
    )  # fmt: skip
    return partial_record(
        0, 1, step, source="kernels", start_unix_ns=10**9 + 10**7 * step, step_ms=10.0, between_steps_ms=0.0,
        overlap=OverlapRecord() if left_out else overlap, is_recorded=not left_out, run_id="r",
        streams={} if left_out else {"compute": StreamUse(busy_ms=8.0, utilization=0.8)},
        modules=["layers.0"], collectives=[] if detailed else None, active_segments=[] if detailed else None,
        memory=None if left_out else memory, device=None if left_out else SAMPLES[sample],
        host_spans=[HostSpan("optimizer", 8.0, 9.0, "AdamW", 64), HostSpan("pause", 9.0, 9.5, "evaluation")],
        not_measured=reasons or {"loss": "not logged"},
    )  # fmt: skip


RECORDS = [
    record(0, True), record(1, False), record(2, False, left_out=True), record(3, False, sample=1),
    record(4, False, sample=1, reasons={"loss": "not finite: nan"}),
    record(5, False, sample=1, memory=MORE), record(6, False, sample=1, memory=MORE),
    record(7, True, sample=1, memory=MORE),
]  # fmt: skip


@pytest.fixture
def lines(tmp_path):
    told = Told()
    with RunFolder(tmp_path, 0) as folder:
        for one in RECORDS:
            folder.steps.write(told.rest_of(one))
    return tmp_path, [json.loads(line) for line in folder.steps.path.read_text().splitlines()]


def test_what_lines_with_details_have_told_is_left_out_of_the_others(lines):
    _, found = lines
    assert found[0]["streams"] == found[7]["streams"] == {"compute": {"busy_ms": 8.0, "utilization": 0.8}}
    assert found[7]["not_measured"] == {"loss": "not logged"}
    assert [line.get("not_measured") for line in found[1:5]] == [
        None,
        None,
        None,
        {"loss": "not finite: nan"},
    ]
    assert [place for place, line in enumerate(found) if "memory" in line] == [0, 5, 7]
    assert [place for place, line in enumerate(found) if "device" in line] == [0, 3, 7]
    assert not {"streams", "modules", "collectives", "active_segments", "loss", "tokens"} & found[1].keys()
    assert found[1]["overlap"] == {
        "comm_ms": 4.0, "compute_ms": 8.0, "hidden_ms": 3.0, "exposed_ms": 1.0, "idle_ms": 1.0
    }  # fmt: skip
    assert found[1]["host_spans"] == [["pause", 9.0, 9.5, "evaluation", None]]
    assert found[1]["packed"] == [[], {}, [[], [], [80000, 10000], [], []], [64]]
    assert found[2]["host_spans"] == [["optimizer", 8.0, 9.0, "", 64], found[1]["host_spans"][0]]


def test_readers_hold_the_last_memory_and_sample_in_recorded_steps(lines):
    metrics = load_run(lines[0], "a").metrics
    nan = float("nan")
    expected = {
        "reserved_memory_bytes": [9, 9, nan, 9, 9, 11, 11, 11],
        "power_w": [100, 100, nan, 300, 300, 300, 300, 300],
        "throttled": [1, 1, nan, 0, 0, 0, 0, 0],
        "throttled.heat": [1, 1, nan, 0, 0, 0, 0, 0],
        "alloc_retries": [nan, 0, nan, nan, 0, 2, 0, 0],
        "overlap_ratio": [0.75, 0.75, nan, *[0.75] * 5],
        "hidden_per_compute": [0.375, 0.375, nan, *[0.375] * 5],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(metrics[name][0], values, err_msg=name)


@pytest.mark.parametrize("top", [[], [(0, 1.5, 2)]])
def test_what_is_packed_is_read_as_it_was(tmp_path, top):
    """To 0.1 µs; the kinds one after the other."""
    spans = [HostSpan("data", -3.0, 0.5), HostSpan("backward", 1.0, 2.0), HostSpan("backward", 2.5, 4.0),
             HostSpan("optimizer", 4.0, 6.0, "", 64), HostSpan("optimizer", 5.0, 5.5001)]  # fmt: skip
    kernels = KernelSums(
        num_kernels=3, num_graph_nodes=1, classes={"gemm": (1.5, 2), "communication": (3.25, 1)}, top=top
    )
    overlap = OverlapRecord(comm_ms=3.0, hidden_by_op={"send": 0.0, "all_reduce": 1.0},
                            exposed_by_op={"send": 0.25, "all_reduce": 2.0})  # fmt: skip
    short = msgspec.structs.replace(record(1, False), host_spans=spans, kernels=kernels, overlap=overlap)
    with RunFolder(tmp_path, 0) as folder:
        folder.steps.write(Told().rest_of(short))
    (whole,) = read_steps(folder.steps.path)
    (block,) = read_blocks(folder.steps.path, [])
    expected = msgspec.structs.replace(short, streams={})
    for part in ("host_spans", "kernels", "overlap"):
        assert getattr(whole, part) == getattr(expected, part)
    assert block.values("kernels") == [kernels]
    assert block.values("overlap") == [overlap]
    found = block.items("host_spans").columns
    assert found["start_ms"].tolist() == [span.start_ms for span in spans]
    assert found["end_ms"].tolist() == [span.end_ms for span in spans]
