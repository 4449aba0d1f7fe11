"""Odd traces that used to give a number that was wrong without a word."""

import gzip
import json
import os
import threading

import numpy as np
import pytest

from aorta.account.load.traces.open import load_traces
from aorta.errors import TraceError
from aorta.timeline.overlap import overlap
from aorta.traces import files as inflate
from aorta.traces import kineto_file
from aorta.traces.sources import open_source
from aorta.traces.steps import Reading, StepRule
from tests.dist.launch import run_python
from tests.larger_data import TRACES, needs_data
from tests.traces.kineto_events import kernel, launch, mark, parse
from tests.traces.trace_writers import kineto

NCCL = "ncclDevKernel_AllReduce"
MI350X_FSDP = TRACES / "mi350x_fsdp_rocprofv3.json.gz"


def write(folder, *events, rank=0, world_size=1, name=None, **header):
    folder.mkdir(exist_ok=True)
    header = {"distributedInfo": {"rank": rank, "world_size": world_size}} | header
    path = folder / (name or f"rank{rank}.json")
    path.write_text(json.dumps(header | {"traceEvents": list(events)}))
    return path


def load(folder, **options):
    return load_traces(folder, "x", reading=Reading(), **options)


def says(run, text):
    return any(text in note for note in run.notes)


# ---- null instead of 0 -------------------------------------------------------------------------


def test_steps_without_runtime_events_are_windows_of_the_host(tmp_path):
    """Two marks of 1 ms, kernels of 0.4 ms in each, and nothing that launched them."""
    events = [mark(0, 1000, "ProfilerStep#1"), mark(1000, 1000, "ProfilerStep#2")]
    events += [kernel(100, 400), kernel(1100, 400)]
    write(tmp_path / "a", *events)
    run = load(tmp_path / "a")
    assert run.metrics["step_ms"][0].tolist() == pytest.approx([1.0, 1.0])
    assert run.metrics["compute_ms"][0].tolist() == pytest.approx([0.4, 0.4])
    assert says(run, "steps are the host's own windows")


@pytest.mark.parametrize("duration", ["missing", "null"])
def test_communication_without_durations_is_not_known(tmp_path, duration):
    late = kernel(0, None, 2, stream=20, name=NCCL)
    if duration == "missing":
        del late["dur"]
    write(tmp_path / "a", mark(0, 100, "ProfilerStep#1"), launch(1, 1), launch(2, 2), kernel(5, 50, 1), late)
    run = load(tmp_path / "a")
    assert np.isnan(run.metrics["comm_ms"]).all()
    assert np.isnan(run.metrics["exposed_ms"]).all()
    assert run.metrics["compute_ms"][0, 0] == pytest.approx(0.05)
    assert run.totals[0]["comm_ms"] is None
    assert run.not_measured["comm_ms"].startswith("1 of 1 comm kernels have no duration")
    assert says(run, "warning: 1 of 1 comm kernels have no duration")


def test_pairs_of_begin_and_end_are_kernels():
    begin = kernel(10, 0, 1, stream=20, name=NCCL) | {"ph": "B"}
    del begin["dur"]
    end = {"ph": "E", "pid": 0, "tid": 20, "ts": 40}
    trace = parse(launch(1, 1), begin, end, kernel(0, 20))
    (one,) = trace.collectives
    assert one.end_ms - one.start_ms == pytest.approx(0.030)


def test_an_impossible_duration_is_left_out_and_said(tmp_path):
    """5 s for one of ten kernels of a stream that goes on after 50 µs."""
    kernels = [kernel(100 * i, 50, i) for i in range(200)]
    kernels[10]["dur"] = 5_000_000
    launches = [launch(100 * i - 1, i) for i in range(200)]
    write(tmp_path / "a", mark(-2, 20_000, "ProfilerStep#1"), *launches, *kernels)
    run = load(tmp_path / "a")
    assert run.metrics["compute_ms"][0, 0] == pytest.approx(199 * 0.05)
    assert run.metrics["step_ms"][0, 0] == pytest.approx(20, abs=0.1)
    assert says(run, "warning: kernels that last on while later ones of their stream run, left out: 1")


def test_a_long_kernel_alone_on_its_stream_stays():
    trace = parse(*(kernel(100 * i, 50) for i in range(50)), kernel(0, 100_000, stream=9, name="persistent"))
    assert trace.timeline.span_ms == pytest.approx(100)


# ---- ranks that do not fit together ------------------------------------------------------------


def steps_of(first, num=3, start=0):
    events = []
    for i in range(num):
        at = start + 1000 * i
        events += [mark(at, 1000, f"ProfilerStep#{first + i}"), launch(at + 1, i), kernel(at + 5, 600, i)]
    return events


@pytest.mark.parametrize("first", [0, 10])
def test_a_rank_without_marks_makes_windows_of_all(tmp_path, first):
    write(tmp_path / "a", *steps_of(first), rank=0, world_size=2)
    write(tmp_path / "a", *(e for e in steps_of(0) if "Step#" not in e["name"]), rank=1, world_size=2)
    run = load(tmp_path / "a")
    assert run.global_step.tolist() == [0]
    assert run.metrics["step_ms"][:, 0].tolist() == pytest.approx([2.6, 2.6])
    assert says(run, "warning: rank 1 marks no steps while others do")


def test_runs_of_different_days_are_refused(tmp_path):
    base = 1_790_000_000_000_000_000
    write(tmp_path / "a", *steps_of(0), rank=0, world_size=2, baseTimeNanoseconds=base)
    write(tmp_path / "a", *steps_of(0), rank=1, world_size=2, baseTimeNanoseconds=base + 86_400 * 10**9)
    with pytest.raises(TraceError, match="mixes runs: rank 1 starts 24.0 hours after rank 0 has ended"):
        load(tmp_path / "a")


def two_gpus():
    """GPU 0 computes from 0 to 100 µs; GPU 1 computes from 0 to 20 and communicates from 20 to 80."""
    return [
        kernel(0, 100, device=0, stream=7),
        kernel(0, 20, device=1, stream=7),
        kernel(20, 60, device=1, stream=20, name=NCCL),
    ]


def test_two_gpus_of_one_trace_are_two_ranks(tmp_path):
    path = write(tmp_path / "a", *two_gpus())
    run = load(path)
    assert run.ranks == [0, 1]
    assert [run.totals[rank]["exposed_ms"] for rank in run.ranks] == pytest.approx([0.0, 0.060])
    assert [run.totals[rank]["compute_ms"] for rank in run.ranks] == pytest.approx([0.100, 0.020])
    assert says(run, "the trace holds 2 GPUs: rank 0 is GPU 0, rank 1 is GPU 1")


def test_of_several_ranks_each_is_of_its_busiest_gpu(tmp_path):
    write(tmp_path / "a", *two_gpus(), rank=0, world_size=2)
    write(tmp_path / "a", kernel(0, 50), rank=1, world_size=2)
    run = load(tmp_path / "a")
    assert run.totals[0]["compute_ms"] == pytest.approx(0.1)
    assert run.totals[0]["comm_ms"] == 0
    assert says(
        run, "warning: the trace holds 2 GPUs: the numbers are of GPU 0, the busiest; left out: GPU 1"
    )


# ---- good traces that were refused -------------------------------------------------------------


def test_categories_of_2021_are_read():
    trace = parse(
        mark(0, 100, "ProfilerStep#3", cat="Operator"),
        launch(10, 1) | {"cat": "Runtime"},
        kernel(20, 50, 1, cat="Kernel"),
        kernel(80, 5, cat="Memcpy", name="Memcpy HtoD"),
    )
    assert [step.step for step in trace.steps] == [3]
    assert trace.quality.num_unlinked == 1


def test_what_is_no_number_in_an_unused_field_does_not_matter():
    data = json.dumps(
        {"traceEvents": [kernel(0, 10, name="a: NaN, b", nice=float("nan"), most=float("-inf"))]}
    )
    assert "NaN" in data
    trace = kineto_file.decode(data.encode(), "t.json", kineto_file.Args)
    assert trace.events[0].dur == 10
    assert trace.events[0].name == "a: NaN, b"


def test_a_tail_of_nul_is_no_damage():
    assert kineto_file.decode(kineto() + b"\0" * 4096, "t.json", kineto_file.Args).events


def test_a_step_that_is_marked_twice_is_one():
    """Written twice by an exporter, on another thread and a little shorter; and once more, much later."""
    trace = parse(
        mark(0, 100, "ProfilerStep#3"),
        mark(0, 100, "ProfilerStep#3"),
        mark(5, 90, "ProfilerStep#3", tid=7),
        mark(100, 100, "ProfilerStep#4"),
        mark(900, 100, "ProfilerStep#3"),
        launch(10, 1),
        launch(110, 2),
        kernel(20, 50, 1),
        kernel(120, 50, 2),
    )
    assert [(step.step, len(step)) for step in trace.steps] == [(3, 1), (4, 1)]
    assert "steps that are marked again later in the trace, left out: 1" in trace.quality.notes


# ---- files that are none -----------------------------------------------------------------------


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rank1.json")
    (tmp_path / "rank0.json").write_bytes(kineto())
    found = []
    reading = threading.Thread(target=lambda: found.append(open_source(tmp_path).ranks), daemon=True)
    reading.start()
    reading.join(20)
    assert found == [[0]]
    with pytest.raises(TraceError, match="rank1.json: it is no regular file"):
        open_source(tmp_path / "rank1.json")


def test_a_device_is_not_read_without_end(tmp_path):
    (tmp_path / "rank0.json").symlink_to("/dev/zero")
    with pytest.raises(TraceError, match="no regular file"):
        open_source(tmp_path / "rank0.json")


@pytest.mark.heavy
def test_a_bomb_is_refused_before_it_fills_the_memory(monkeypatch):
    """As 3 GB of spaces in 13 MB, here with smaller limits."""
    monkeypatch.setattr(inflate, "LARGEST_SMALL_BYTES", 1 << 20)
    monkeypatch.setattr(inflate, "UNPACKED_BYTES", 1 << 16)
    data = gzip.compress(b'{"traceEvents":[' + b" " * (16 << 20))
    with pytest.raises(TraceError, match="unpacks to more than .* GB, which no trace of its size does"):
        inflate.unpack(data, "bomb.json.gz")
    assert inflate.unpack(gzip.compress(b"{}") + gzip.compress(b"[]"), "two members") == b"{}[]"


# ---- steps that nothing marks ------------------------------------------------------------------


def unmarked(num_steps=5, layers=4):
    """Steps of 1 ms: a first kernel after 300 µs of rest, layers of two kernels, an optimizer."""
    events = []
    for step in range(num_steps):
        at = 1000 * step
        names = ["embed", *["gemm", "norm"] * layers, "adam"]
        events += [kernel(at + 300 + 50 * i, 40, name=name) for i, name in enumerate(names)]
    return events


def test_steps_that_repeat_clearly_are_found(tmp_path):
    path = write(tmp_path / "a", *unmarked())
    run = load(path)
    assert run.num_steps == 5
    assert run.metrics["step_ms"][0, :4].tolist() == pytest.approx([1.0] * 4)
    assert says(run, "the trace marks no steps; 5 were cut out by what repeats after 10 kernels")


def decode(at, layers):
    """A forward pass: layers of two kernels between kernels of its own."""
    names = ["embed", *["gemm", "norm"] * layers, "head", "sample"]
    return [kernel(at + 10 * i, 8, name=name) for i, name in enumerate(names)]


def test_layers_are_no_steps(tmp_path):
    """36 layers repeat clearly, and what stands around them shows that they are parts of something."""
    run = load(write(tmp_path / "a", *decode(0, 36)))
    assert run.global_step.tolist() == [0]
    assert run.metrics["step_ms"][0].tolist() == pytest.approx([0.748])  # 75 kernels, 10 µs apart
    assert says(run, "the trace marks no steps: the whole trace counts as one step")


def test_passes_of_many_layers_are_steps(tmp_path):
    """Four of them, each of 39 kernels, 1 ms apart."""
    run = load(write(tmp_path / "a", *(event for i in range(4) for event in decode(1000 * i, 18))))
    assert run.num_steps == 4
    assert run.metrics["step_ms"][0, :3].tolist() == pytest.approx([1.0] * 3)


@pytest.mark.parametrize(("update", "num_steps"), [("adam", 5), ("copy", 1)])
def test_an_optimizer_proves_steps_behind_a_start_of_other_kernels(tmp_path, update, num_steps):
    start = [kernel(i, 0.5, name="init") for i in range(2)]
    steps = [event | {"name": event["name"].replace("adam", update)} for event in unmarked(5)]
    assert load(write(tmp_path / "a", *start, *steps)).num_steps == num_steps


def annotated(*names, parts=(), between_us=1000):
    """A pass under each annotation, which ends with the launch of its last kernel; parts within the first."""
    events = [mark(100 * i + 1, 50, name) for i, name in enumerate(parts)]
    for i, name in enumerate(names):
        at = between_us * i
        events += [mark(at, 900, name)]
        for j in range(4):
            events += [launch(at + 10 * j, 10 * i + j), kernel(at + 20 + 100 * j, 80, 10 * i + j)]
    return events


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["execute_context_1(888)_generation_0(0)", "execute_context_0(0)_generation_1(1)"], [0, 1]),
        (["step[EXTEND bs=4]", "step[DECODE bs=32]", "step[DECODE bs=32]"], [0, 1, 2]),
        (["[Executor] _forward_step 7: 1 ctx reqs", "[Executor] _forward_step 8: 1 ctx reqs"], [7, 8]),
        (["train_step 12", "train_step 13"], [12, 13]),
        (["gpu_model_runner: forward"] * 3, [0, 1, 2]),
        (["iteration"] * 2, [0, 1]),
    ],
)
def test_iterations_that_a_program_marks_are_steps(tmp_path, names, steps):
    """Each lasts until the next begins."""
    run = load(write(tmp_path / "a", *annotated(*names)))
    assert run.global_step.tolist() == steps
    assert run.metrics["step_ms"][0, 0] == pytest.approx(1.0)
    assert run.metrics["compute_ms"][0].tolist() == pytest.approx([0.32] * len(steps))


def test_an_annotation_within_an_iteration_is_a_part_of_it(tmp_path):
    """Four parts named as steps in a pass, and a second pass: the passes are the steps."""
    events = annotated("step[DECODE bs=1]", "step[DECODE bs=1]", parts=["forward_batch"] * 4)
    assert load(write(tmp_path / "a", *events)).num_steps == 2


@pytest.mark.parametrize(
    "name", ["nccl:all_reduce", "Torch-Compiled Region: 0/0", "Optimizer.step#SGD.step", "layer", "steps_of"]
)
def test_what_a_layer_may_be_named_is_no_step(tmp_path, name):
    assert load(write(tmp_path / "a", *annotated(name, name, name))).global_step.tolist() == [0]


def test_one_iteration_alone_is_the_window_of_the_trace(tmp_path):
    run = load(write(tmp_path / "a", *annotated("step[DECODE bs=32]")))
    assert run.global_step.tolist() == [0]
    assert says(run, "the whole trace counts as one step")


def test_marks_of_a_profiler_outweigh_iterations(tmp_path):
    events = [*annotated("step 1", "step 2", "step 3"), mark(0, 3000, "ProfilerStep#9")]
    assert load(write(tmp_path / "a", *events)).global_step.tolist() == [9]


def test_a_capture_that_begins_within_a_step_is_cut_at_its_rest(tmp_path):
    path = write(tmp_path / "a", *unmarked(6)[4:-3])
    run = load(path)
    assert run.num_steps == 4
    assert run.metrics["step_ms"][0].tolist() == pytest.approx([1.0] * 4)
    assert run.metrics["compute_ms"][0].tolist() == pytest.approx([0.4] * 4)


@pytest.mark.parametrize(
    ("rule", "num_steps"),
    [
        (StepRule(kernel="adam"), 4),
        (StepRule(kernel="gemm", period=4), 4),
        (StepRule(period=10), 5),
        (StepRule(is_off=True), 1),
    ],
)
def test_steps_as_asked_for(tmp_path, rule, num_steps):
    path = write(tmp_path / "a", *unmarked())
    assert load_traces(path, "x", reading=Reading(steps=rule)).num_steps == num_steps


def test_a_kernel_that_is_not_there_is_named(tmp_path):
    path = write(tmp_path / "a", *unmarked())
    with pytest.raises(
        TraceError, match="no kernel of the compute stream has 'sgd' in its name; it has adam"
    ):
        load_traces(path, "x", reading=Reading(steps=StepRule(kernel="sgd")))


def test_nothing_is_found_in_what_does_not_repeat(tmp_path):
    rng = np.random.default_rng(0)
    names = rng.choice(["a", "b", "c", "d", "e"], 300)
    path = write(tmp_path / "a", *(kernel(10 * i, 8, name=str(name)) for i, name in enumerate(names)))
    run = load(path)
    assert run.num_steps == 1
    assert says(run, "the trace marks no steps: the whole trace counts as one step")


@needs_data(MI350X_FSDP)
@pytest.mark.heavy
def test_the_steps_of_a_real_capture_without_marks():
    """50 training steps under rocprofv3."""
    trace = Reading().read(source := open_source(MI350X_FSDP), source.ranks[0])
    assert len(trace.steps) == 50
    # The first begins with what repeats, behind the program's own start, and the last ends with the capture.
    assert {len(step) for step in trace.steps[1:-1]} == {822}
    start_ms = (trace.timeline.window_ms[0], trace.steps[0].window_ms[0])
    windows = [trace.timeline.clipped(*window) for window in (start_ms, *(s.window_ms for s in trace.steps))]
    assert sum(overlap(window).comm_ms for window in windows) == pytest.approx(4158.76, abs=0.01)


# ---- the command -------------------------------------------------------------------------------


def test_the_command_takes_steps(tmp_path):
    path = write(tmp_path / "a", *unmarked())
    arguments = ["--log-dir", str(path), "--label", "x", "--output", str(tmp_path / "out")]
    arguments += ["--step-kernel", "adam", "--no-page", "--no-perfetto", "--no-parquet"]
    done = run_python("analysis/overlap_report.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert "4 were cut out by a kernel with 'adam' in its name" in done.stdout
    assert json.loads((tmp_path / "out/summary.json").read_text())["datasets"]["x"]["num_steps"] == 3
