"""aorta capture: a request in the run's folder becomes a trace of the steps that rank 0 chose."""

import gzip
import time
from pathlib import Path

import msgspec
import torch

from aorta.record import profiler
from aorta.record.profiler import RequestedCapture
from aorta.records.requests import CaptureRequest, ask_for_capture, read_plan, trace_name


def test_a_request_becomes_a_trace_of_the_planned_steps(tmp_path: Path) -> None:
    capture = RequestedCapture(tmp_path, rank=0)
    ask_for_capture(tmp_path, CaptureRequest(id="01", num_steps=2))
    path = tmp_path / trace_name("01", 0)
    deadline_s = time.monotonic() + 60
    for step in range(10**9):
        capture.step_begins(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(8).sum()
        time.sleep(0.02)
        if path.exists() or time.monotonic() > deadline_s:
            break
    capture.close()
    plan = read_plan(tmp_path)
    assert plan is not None
    assert plan.num_steps == 2
    events = msgspec.json.decode(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events if str(event.get("name")).startswith("step ")}
    assert names == {f"step {plan.first_step}", f"step {plan.first_step + 1}"}


def test_a_plan_that_was_carried_out_is_not_repeated(tmp_path: Path) -> None:
    profiler.plan_capture(tmp_path, profiler.CapturePlan(id="0d", first_step=0, num_steps=1))
    capture = RequestedCapture(tmp_path, rank=1)
    time.sleep(2 * profiler.REQUEST_POLL_S)
    capture.step_begins(0)
    capture.step_begins(1)
    capture.close()
    assert not (tmp_path / "torch_profiler").exists()
