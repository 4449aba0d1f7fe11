"""What traces tell of the host, and how it splits the idle time of the device.

Times are in µs, as in the files.
"""

from pathlib import Path

import numpy as np
import pytest

from aorta.account.load.rank.reduce import reduce_records
from aorta.account.load.traces.open import load_traces
from aorta.account.load.traces.steps import step_records
from aorta.traces.host_calls import NO_CALLS as NO_CALLS_MADE
from aorta.traces.host_calls import host_of_calls, link
from aorta.traces.host_spans import NO_CALLS, NO_RANGES, HostEvent
from aorta.traces.sources import open_source
from aorta.traces.steps import Reading
from tests.larger_data import FOLDER, needs_data
from tests.traces.kineto_events import kernel, launch, mark, parse
from tests.traces.trace_writers import WRITERS

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
BACKWARD = "autograd::engine::evaluate_function: MmBackward0"
FOREIGN = FOLDER / "traces_foreign"


def operator(ts, dur, name, tid=1):
    return mark(ts, dur, name, "cpu_op", tid)


def call(ts, dur, name, correlation=0, tid=1):
    return launch(ts, correlation, tid, name=name) | {"dur": dur}


def copy(ts, dur, correlation, name="Memcpy DtoH"):
    return kernel(ts, dur, correlation, name=name, cat="gpu_memcpy")


STEP = mark(0, 1000, "ProfilerStep#0")
LAUNCHED = [launch(300, 1), kernel(310, 190, 1), launch(610, 2), kernel(620, 20, 2)]
WORK = [*LAUNCHED, operator(299, 3, "aten::mm")]
"""A step of 1000 µs in which the device works from 310 to 500 and from 620 to 640."""


def metrics_ms(*events):
    """Columns of the only step, NaN left out."""
    records = step_records(parse(*events), 1)
    columns = reduce_records(Path("t.json"), records).sources["kineto"].numbers
    return {name: float(values[0]) for name, values in columns.items() if np.isfinite(values[0])}


def record(*events):
    (only,) = step_records(parse(*events), 1)
    return only


def spans_us(*events, kind):
    """Start and end of the step's spans of a kind."""
    return [
        (round(1000 * span.start_ms), round(1000 * span.end_ms))
        for span in record(*events).host_spans
        if span.kind == kind
    ]


def test_idle_is_split_by_what_the_host_did():
    """Idle 790 of 1000 µs: 200 of loading, 80 of the 100 of the optimizer, 510 of neither."""
    metrics = metrics_ms(
        STEP, *WORK, operator(100, 200, LOADER), operator(600, 100, "Optimizer.step#SGD.step")
    )
    assert metrics["idle_ms"] == pytest.approx(0.79)
    assert metrics["host.idle.data"] == pytest.approx(0.2)
    assert metrics["host.idle.optimizer"] == pytest.approx(0.08)
    assert metrics["host.idle.other"] == pytest.approx(0.51)
    assert metrics["host.data"] == pytest.approx(0.2)
    assert metrics["host.optimizer"] == pytest.approx(0.1)


def test_time_in_which_only_a_copy_runs_is_no_time_of_the_host():
    """300 µs of loading, 100 of them beside a copy."""
    metrics = metrics_ms(STEP, *WORK, operator(700, 300, LOADER), launch(790, 3), copy(800, 100, 3))
    assert metrics["exposed_copy_ms"] == pytest.approx(0.1)
    assert metrics["host.idle.data"] == pytest.approx(0.2)
    parts = sum(value for name, value in metrics.items() if name.startswith("host.idle."))
    assert parts == pytest.approx(metrics["idle_ms"] - metrics["exposed_copy_ms"])


def test_a_batch_loaded_ahead_of_the_device_counts_in_the_step_that_idles():
    """The device reaches step 1 at 1500, when step 0's kernel ends; it loads on from 900 to 1100."""
    events = [
        STEP, mark(1000, 1000, "ProfilerStep#1"), launch(10, 1), kernel(20, 1480, 1), launch(1200, 2),
        kernel(1900, 10, 2), operator(900, 200, LOADER), operator(1600, 200, LOADER),
    ]  # fmt: skip
    first, second = (
        [(round(1000 * span.start_ms), round(1000 * span.end_ms)) for span in step.host_spans]
        for step in step_records(parse(*events), 1)
    )
    assert (first, second) == ([(900, 1100)], [(100, 300)])


def test_a_loader_on_a_thread_of_its_own_does_not_count():
    assert spans_us(STEP, *WORK, operator(100, 200, LOADER, tid=9), kind="data") == []


def test_a_trace_without_marks_counts_the_threads_that_launch():
    events = [*WORK, operator(320, 50, LOADER), operator(330, 50, LOADER, tid=9)]
    assert spans_us(*events, kind="data") == [(10, 60)]


@pytest.mark.parametrize(
    "name",
    [
        "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "hipDeviceSynchronize",
        "cuStreamSynchronize", "cudaMemcpy", "hipFree",
    ],
)  # fmt: skip
def test_calls_that_wait_for_the_device(name):
    assert spans_us(STEP, *WORK, call(510, 70, name), kind="synchronisation") == [(510, 580)]


def test_a_wait_below_20_us_is_none():
    assert spans_us(STEP, *WORK, call(510, 19, "cudaStreamSynchronize"), kind="synchronisation") == []


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        pytest.param(800, [(700, 800)], id="after-the-copy"),
        pytest.param(785, [(700, 785)], id="when-most-of-it-is-done"),
        pytest.param(740, [], id="before-the-copy"),
    ],
)
@pytest.mark.parametrize("name", ["cudaMemcpyAsync", "hipMemcpyWithStream"])
def test_a_copy_that_returns_when_it_is_done_waits(name, returned, expected):
    """The copy runs from 760 to 790."""
    events = [STEP, *WORK, call(700, returned - 700, name, 3), copy(760, 30, 3)]
    assert spans_us(*events, kind="synchronisation") == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Memcpy DtoH (Device -> Pageable)", [(700, 740)]),
        ("Memcpy HtoD (Host -> Device)", [(700, 740)]),
        ("Memcpy DtoD (Device -> Device)", []),
        ("Memcpy PtoP (Device -> Device)", []),
        ("Memcpy HtoD (Pinned -> Device)", []),
        ("MEMORY_COPY_DEVICE_TO_DEVICE", []),
    ],
)
def test_a_copy_within_devices_or_of_pinned_memory_is_not_awaited(name, expected):
    """On an idle device a short one is over, 735 to 738, before the call that launches it is."""
    events = [STEP, *WORK, call(700, 40, "cudaMemcpyAsync", 3), copy(735, 3, 3, name)]
    assert spans_us(*events, kind="synchronisation") == expected


def test_a_backward_pass_is_one_span():
    """Two passes: the loop launches a kernel at 500, between them."""
    operators = [operator(ts, 20, BACKWARD, tid=2) for ts in (400, 430, 460, 520, 550)]
    events = [STEP, *WORK, *operators, launch(500, 5), kernel(505, 5, 5)]
    assert spans_us(*events, kind="backward") == [(400, 480), (520, 570)]


def test_operators_of_earlier_versions_name_the_backward_pass():
    events = [STEP, *WORK, operator(400, 20, "MmBackward", tid=2), operator(430, 20, "AddBackward0", tid=2)]
    assert spans_us(*events, kind="backward") == [(400, 450)]


def test_python_functions_tell_of_checkpoints_and_collections():
    functions = [
        mark(700, 100, "torch/serialization.py(944): save", "python_function"),
        mark(720, 30, "torch/serialization.py(1183): _save", "python_function"),
        mark(850, 40, "Python GC", "python_function"),
        mark(0, 1000, "train_dataloader.py(3): <module>", "python_function"),
    ]
    events = [STEP, *WORK, *functions]
    assert spans_us(*events, kind="checkpoint") == [(700, 800)]
    assert spans_us(*events, kind="garbage_collection") == [(850, 890)]
    assert spans_us(*events, kind="data") == []


def test_a_trace_without_host_calls_says_so():
    only = record(mark(0, 1000, "ProfilerStep#0"), kernel(310, 190), kernel(620, 20))
    assert only.host_spans is None
    assert only.not_measured["host_spans"] == NO_CALLS
    assert not [name for name in metrics_ms(kernel(310, 190)) if name.startswith("host.")]


def test_calls_alone_do_not_tell_what_the_host_did():
    """Waits are seen; a loader or an optimizer would not be, and what idles behind a wait may be theirs."""
    events = [STEP, *LAUNCHED, call(510, 70, "cudaDeviceSynchronize")]
    assert record(*events).host_spans is None
    assert record(*events).not_measured["host_spans"] == NO_RANGES
    assert not [name for name in metrics_ms(*events) if name.startswith("host.")]


@pytest.mark.parametrize(
    ("waits_from", "waits_until", "cost_us"),
    [
        pytest.param(480, 505, 25, id="its-own-length"),
        pytest.param(320, 470, 150, id="in-all-that-idles-later"),
        pytest.param(650, 850, 200, id="from-then-on"),
        pytest.param(0, 20, 20, id="at-the-beginning"),
        pytest.param(950, 1000, 50, id="at-the-end"),
    ],
)
def test_a_wait_costs_the_idle_time_behind_it(waits_from, waits_until, cost_us):
    """The device works from 310 to 500 and from 620 to 640: the host would have been ahead."""
    wait = call(waits_from, waits_until - waits_from, "cudaStreamSynchronize")
    metrics = metrics_ms(STEP, *WORK, wait)
    assert metrics["host.idle.synchronisation"] == pytest.approx(cost_us / 1000)
    assert metrics["host.idle.other"] == pytest.approx(0.79 - cost_us / 1000)


def test_a_wait_at_the_end_of_a_trace_costs_nothing():
    """The step ends at 640, with the last kernel: the 110 µs idle before it are not the wait's."""
    wait = call(621, 400, "cudaDeviceSynchronize")
    metrics = metrics_ms(mark(300, 330, "ProfilerStep#0"), *WORK, wait)
    assert metrics["host.synchronisation"] == pytest.approx(0.019)
    assert metrics["host.idle.synchronisation"] == 0


def test_a_wait_at_the_end_of_a_step_costs_the_next_one():
    """Step 0 waits for 80 µs until its end; step 1 begins idle, for 50 µs."""
    events = [
        mark(0, 200, "ProfilerStep#0"), mark(200, 200, "ProfilerStep#1"), operator(1, 1, "aten::mm"),
        launch(1, 1), kernel(10, 190, 1), call(120, 80, "cudaStreamSynchronize"),
        launch(245, 2), kernel(250, 150, 2),
    ]  # fmt: skip
    columns = reduce_records(Path("t.json"), step_records(parse(*events), 1)).sources["kineto"].numbers
    assert columns["host.idle.synchronisation"] == pytest.approx([0.0, 0.05])


def test_loading_behind_a_wait_is_loading():
    """Of 480 µs idle behind a wait of 195 the loader has all but 60."""
    wait, loading = call(310, 195, "cudaStreamSynchronize"), operator(520, 80, LOADER)
    metrics = metrics_ms(STEP, *WORK, wait, loading, operator(640, 340, LOADER))
    assert metrics["host.idle.data"] == pytest.approx(0.42)
    assert metrics["host.idle.synchronisation"] == pytest.approx(0.06)


def test_kinds_that_a_trace_cannot_show_have_a_reason_and_no_number(tmp_path):
    events = [STEP, *WORK, operator(100, 200, LOADER)]
    assert not {"host.checkpoint", "host.garbage_collection", "host.pause"} & metrics_ms(*events).keys()
    reasons = reduce_records(Path("t.json"), step_records(parse(*events), 1)).sources["kineto"].not_measured
    assert {"host.checkpoint", "host.garbage_collection", "host.pause"} <= reasons.keys()
    assert not {"host.data", "host.optimizer", "host.synchronisation"} & reasons.keys()


# ---- other formats -----------------------------------------------------------------------------


@pytest.mark.parametrize("writer", WRITERS)
def test_every_format_tells_of_waits(tmp_path, writer):
    name, write = WRITERS[writer]
    write(tmp_path / name)
    source = open_source(tmp_path)
    trace = source.read(source.ranks[0])
    ((kind, start_ms, end_ms),) = [(span.kind, span.start_ms, span.end_ms) for span in trace.host_spans]
    assert kind == "synchronisation"
    assert (start_ms, end_ms) == pytest.approx((0.030, 0.065))  # from the first kernel on
    assert trace.host_not_shown["data"] == NO_RANGES


def test_ranges_of_operators_tell_of_loaders_and_optimizers():
    """As torch.autograd.profiler.emit_nvtx makes them; a loader on another thread does not count."""
    ranges = [
        HostEvent("ProfilerStep#0", 0, 1_000_000, 1), HostEvent(LOADER, 100, 200_000, 1),
        HostEvent(LOADER, 300, 400_000, 9), HostEvent("Optimizer.step#SGD.step", 500_000, 600_000, 1),
        HostEvent(BACKWARD, 420_000, 450_000, 2),
    ]  # fmt: skip
    side = host_of_calls([], ranges, ([], np.empty(0, np.int64)), link(np.empty(0, np.int64), NO_CALLS_MADE))
    assert [(note.kind, note.start_ns, note.end_ns) for note in side.notes] == [
        ("data", 100, 200_000),
        ("backward", 420_000, 450_000),
        ("optimizer", 500_000, 600_000),
    ]
    assert side.shown == {"data", "backward", "optimizer"}


# ---- public traces -----------------------------------------------------------------------------


@needs_data(FOREIGN)
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        # A count of whole µs over the device's span: 286.9 of 392.9 ms idle, and 2.8 of 187.1.
        ("v100_resnet50_workers0_kineto.json.gz", 0.6, 0.8),
        ("v100_resnet50_workers4_kineto.json.gz", 0.0, 0.03),
    ],
)
def test_share_of_idle_that_a_loader_costs(name, least, most):
    run = load_traces(FOREIGN / name, "x", reading=Reading())
    share = run.host_parts["host.idle.data"].sum() / run.metrics["idle_ms"].sum()
    assert least <= share <= most


@needs_data(FOREIGN)
def test_a_trace_of_the_device_alone_does_not_split_idle():
    run = load_traces(FOREIGN / "mi210_gpu_only_kineto.json.gz", "x", reading=Reading())
    assert not run.host_parts
    assert run.not_measured["host_spans"] == NO_RANGES
