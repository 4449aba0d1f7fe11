"""The sentence on what aorta cost a run."""

from types import SimpleNamespace

from aorta.account.judge.overhead import overhead_texts
from aorta.records.schema import OverheadRecord

KNOWN = OverheadRecord(
    limit=0.01, cost=0.013, interval=(0.008, 0.018), later_cost=0.006, later_interval=(0.004, 0.0081),
    step_ms=3.0, step_interval_ms=(2.0, 4.0), always_on=0.001, every=12.2, num_steps=900, num_recorded=96,
    num_first=24,
)  # fmt: skip
UNKNOWN = OverheadRecord(
    limit=0.01, cost=None, interval=None, always_on=None, every=None, num_steps=20, num_recorded=20
)


def texts(*overheads, versions=None, launch_us=None, **means):
    runs = [
        SimpleNamespace(
            source="kernels",
            noted=SimpleNamespace(
                overhead=overhead,
                versions=versions or {},
                coverage={"kernel_records": {} if launch_us is None else {"tracer_launch_us": launch_us}},
            ),
            label=f"run {i}",
            metrics=means,
            mean_of=means.get,
        )
        for i, overhead in enumerate(overheads)
    ]
    return overhead_texts(SimpleNamespace(runs=runs))


def test_the_cost_is_said_with_its_interval_and_its_limit():
    assert texts(KNOWN) == [
        "aorta cost 1.3 % [0.8, 1.8] of this run (0.6 % [0.4, 0.81] after its first 24 steps, which are all"
        " recorded, limit 1 %)"
    ]


def test_what_stays_on_is_said_where_it_is_above_the_limit():
    """The limit cannot leave it out."""
    short_loop = OverheadRecord(
        limit=0.01, cost=0.13, interval=(0.06, 0.2), later_cost=0.125, later_interval=(0.055, 0.195),
        always_on=0.12, always_on_interval=(0.05, 0.19), always_on_ms=0.035, every=120.0, num_steps=6000,
        num_recorded=72, num_first=24,
    )  # fmt: skip
    (text,) = texts(short_loop)
    assert text.endswith(
        ", limit 1 %). More than the limit of 1 % stays on in every step, recorded or not:"
        " 12 % [5, 19], 35.0 us a step"
    )


def test_of_a_short_run_it_is_of_the_whole():
    short = OverheadRecord(
        limit=0.01,
        cost=0.05,
        interval=(-0.01, 0.25),
        always_on=0.001,
        every=None,
        num_steps=38,
        num_recorded=22,
    )
    assert texts(short) == ["what aorta cost this run cannot be told from how its steps vary, 25 % at most"]


def test_first_steps_that_are_longer_are_not_called_aortas_cost():
    """A loop on a machine that was busy at its start: 299 ms a step, then 42."""
    busy = OverheadRecord(
        limit=0.01, cost=0.76, interval=(0.05, 1.47), step_ms=266.0, step_interval_ms=(17.0, 515.0),
        always_on=0.003, every=None, num_steps=117, num_recorded=22, num_first=24,
    )  # fmt: skip
    (text,) = texts(busy)
    assert text.startswith("what aorta cost this run is not known: its first 24 recorded steps took longer")


def test_what_stays_on_is_said_where_the_cost_of_recording_is_not_known():
    """Of a loop of 0.3 ms, of which the limit keeps only the first steps."""
    short_steps = OverheadRecord(
        limit=0.01, cost=0.17, interval=(0.05, 0.29), step_ms=0.79, step_interval_ms=(0.54, 1.03),
        always_on=0.17, always_on_interval=(0.05, 0.28), always_on_ms=0.0586, every=None, num_steps=5998,
        num_recorded=22, num_first=24,
    )  # fmt: skip
    (text,) = texts(short_steps)
    assert text.startswith("what aorta cost this run is not known")
    assert text.endswith("stays on in every step, recorded or not: 17 % [5, 28], 58.6 us a step")


def test_nothing_is_said_where_it_is_not_known():
    assert texts(UNKNOWN) == []
    assert texts(None) == []


def test_each_run_of_several_has_its_own():
    assert [text.partition(" (")[0] for text in texts(KNOWN, UNKNOWN, KNOWN)] == [
        "aorta cost 1.3 % [0.8, 1.8] of run 0",
        "aorta cost 1.3 % [0.8, 1.8] of run 2",
    ]


GRU_LOOP = {"step_ms": 40.0, "idle_ms": 20.0, "kernel_count.gemm": 1500.0, "kernel_count.elementwise": 1000.0}


def test_what_cupti_takes_of_launches_is_in_the_cost():
    """2,500 launches of 1.6 us are 4 ms of 40, 11.1 % of the other 36, and 22.2 % at most."""
    (text,) = texts(KNOWN, **GRU_LOOP)
    assert text == (
        "aorta cost 12 % [1, 24] of this run (12 % [0, 23] after its first 24 steps, which are all recorded,"
        " limit 1 %). 4.00 ms a step [0, 8.00] of what aorta costs is CUPTI's, which times the kernels and"
        " makes 2500 launches slower (--kernels off is without it)"
    )


def test_a_host_that_was_measured_has_its_own_cost():
    """BERT's step with all of aorta off and on in turn: 1.060 [1.033, 1.094]. A launch of a burst was 0.85 us
    slower; twice that for 1,240 launches are 2.11 ms, 5.8 % of the other 36.4."""
    bert = OverheadRecord(
        limit=0.01, cost=0.0129, interval=(0.003, 0.022), always_on=0.0087,
        always_on_interval=(0.0026, 0.0143), always_on_ms=0.346, every=None, num_steps=1343, num_recorded=91,
    )  # fmt: skip
    (text,) = texts(bert, launch_us=0.85, step_ms=38.5, idle_ms=9.0, **{"kernel_count.gemm": 1240.0})
    assert text == (
        "aorta cost 7 % [0, 14] of this run. More than the limit of 1 % stays on in every step, recorded or"
        " not: 7 % [0, 13], 2.45 ms a step. 2.11 ms a step [0, 4.22] of what aorta costs is CUPTI's, which"
        " times the kernels and makes 1240 launches slower (--kernels off is without it)"
    )


def test_what_stays_on_is_the_least_that_a_run_costs():
    """Its recorded steps were the shorter ones, by their scatter: CUPTI takes 1.6 ms of 80, 2 %."""
    scatters = OverheadRecord(
        limit=0.01, cost=-0.03, interval=(-0.08, 0.02), always_on=0.004, always_on_interval=(0.001, 0.006),
        always_on_ms=0.31, every=None, num_steps=900, num_recorded=24,
    )  # fmt: skip
    (text,) = texts(scatters, step_ms=80.0, idle_ms=20.0, **{"kernel_count.gemm": 1000.0})
    assert text.startswith("aorta cost 2.4 % [0, 6.1] of this run. More than the limit")
    assert "stays on in every step, recorded or not: 2.4 % [0.1, 4.7], 1.91 ms a step" in text


def test_where_cupti_was_in_the_process_before_aorta_adds_nothing():
    assert texts(KNOWN, launch_us=0.0, **GRU_LOOP) == texts(KNOWN)


def test_it_is_at_most_what_the_device_idles():
    (text,) = texts(KNOWN, **GRU_LOOP | {"idle_ms": 0.6})
    assert "0.600 ms a step [0, 0.600] of what aorta costs is CUPTI's" in text
    assert "CUPTI" not in texts(KNOWN, **GRU_LOOP | {"idle_ms": 0.3})[0]


def test_nodes_of_graphs_are_not_launched():
    """100 of the 2,500 are, 0.16 ms of 40, 0.32 at most."""
    assert "CUPTI" not in texts(KNOWN, **GRU_LOOP | {"graph_nodes": 2400.0})[0]


def test_another_tracer_has_no_such_cost_that_is_known():
    assert "CUPTI" not in texts(KNOWN, versions={"hip": "6.4"}, **GRU_LOOP)[0]


def test_runs_without_kernel_records_say_nothing_of_it():
    assert "CUPTI" not in texts(KNOWN, step_ms=40.0, idle_ms=20.0)[0]
