"""Work per time, memory and telemetry: in the numbers, the words, the comparison and the gate."""

import json
import re
import shutil

import numpy as np
import pytest

from aorta.account.judge.answer import dataset_answer, losses
from aorta.account.judge.gate import check_budget, load_budget
from aorta.account.judge.judged import dataset, judge
from aorta.account.judge.ranks import judged_ranks
from aorta.account.load.open import load_run
from aorta.page.html import page
from aorta.page.table import comparison_table, dataset_table
from aorta.page.timeline import steps_to_show, timeline_data
from aorta.page.write import make_report
from aorta.records.schema import CollectiveRecord, DeviceRecord, MemoryRecord, PeakRecord
from aorta.timeline.types import OverlapRecord
from tests.records.run_folders import run_record, step_record, step_timeline, write_run
from tests.why.causes import runs

PEAK = PeakRecord(flops_per_s=1e15, precision="bf16", hardware="Invented GPU", origin="a data sheet, 2024-11")
NOT_TIMED = OverlapRecord(
    comm_ms=None, compute_ms=None, hidden_ms=None, exposed_ms=None, idle_ms=None, exposed_copy_ms=None,
    overlap_ratio=None, hidden_per_compute=None, compute_allreduce_ms=None, compute_reducescatter_ms=None,
    hidden_by_op={}, exposed_by_op={},
)  # fmt: skip
"""For steps whose length alone is given."""
GPU = {"kind": "cuda", "name": "Invented GPU", "memory_bytes": 140 << 30}


def run_of(folder, num_ranks=2, num_steps=12, run=None, late=None, idle=1.0, compute=8.0, **changes):
    """changes: of every record, or what gives it from rank and step. late: who comes 2 ms late."""
    rng = np.random.default_rng(0)
    records = []
    for step in range(num_steps):
        noise = rng.normal(1, 0.002)
        for rank in range(num_ranks):
            waits = 0.0 if late in (None, rank) else 2.0
            work = compute * noise - waits
            line = step_timeline(rank=rank, step=step, idle=idle, compute=work, exposed=1.0 + waits)
            made = {name: one(rank, step) if callable(one) else one for name, one in changes.items()}
            end = compute * noise + 1.0
            start = end - (1.0 if rank == late else 3.0)
            gather = CollectiveRecord(
                op="all_gather", stream="allgather", group="dp", ranks=list(range(num_ranks)), bytes=1 << 20,
                dtype="bfloat16", seq=step, start_ms=float(start), end_ms=float(end), algbw_gb_s=None,
                busbw_gb_s=None,
            )  # fmt: skip
            records.append(step_record(line, num_ranks, **({"collectives": [gather]} | made)))
    return write_run(folder, records, run or run_record(num_ranks, devices=[GPU] * num_ranks))


def report_of(folder, label="a", **changes):
    return make_report([run_of(folder, **changes)], [label])


def device(**changes):
    fields = dict(sample_unix_ns=1, power_w=700.0, sm_clock_mhz=1980.0, temperature_c=60.0, throttling=[])
    return DeviceRecord(**(fields | changes))


def hot(rank, step):
    """Rank 1 at 600 MHz for a third of the run."""
    slow = rank == 1 and step % 3 == 0
    return device(sm_clock_mhz=600.0, throttling=["hw_thermal_slowdown"]) if slow else device()


# ---- work per time


def test_rates_are_those_worked_out_by_hand(tmp_path):
    """Two ranks with 1000 tokens each in 10 ms; 10^9 FLOP a token; 700 W each."""
    run = run_record(2, flops_per_token=1e9, peak_flops=PEAK)
    found = load_run(
        run_of(tmp_path / "a", run=run, tokens=1000, device=device(), step_ms=10.0, overlap=NOT_TIMED), "a"
    )
    values = {name: float(np.median(found.metrics[name])) for name in found.metrics}
    assert values["tokens_per_step"] == 2000
    assert values["tokens_per_s"] == pytest.approx(200_000)
    assert values["tokens_per_s_per_gpu"] == pytest.approx(100_000)
    assert values["model_tflops_per_gpu"] == pytest.approx(100)
    assert values["mfu"] == pytest.approx(0.1)
    assert values["energy_per_token_mj"] == pytest.approx(700 * 10 * 2 / 2000)


def test_work_per_time_is_of_the_steps_that_the_median_beside_it_is_of(tmp_path):
    """1000 tokens in steps of 10 ms that were timed, and in more steps of 5 ms that were not."""

    def few(of_recorded, of_others):
        return lambda rank, step: of_recorded if step % 3 == 0 else of_others

    found = report_of(
        tmp_path / "a", num_ranks=1, tokens=1000, step_ms=few(10.0, 5.0), is_recorded=few(True, False),
        overlap=lambda rank, step: step_record(step_timeline()).overlap if step % 3 == 0 else NOT_TIMED,
    ).datasets["a"]  # fmt: skip
    text = dataset_table(found)
    assert "median 10.0, p95 10.0" in text
    assert re.search(r"^tokens/s, mean +100,000$", text, re.M)
    assert found.statistics["tokens_per_s"].median == pytest.approx(200_000)


def test_work_per_time_is_of_the_mean_step_where_single_ones_only_launch(tmp_path):
    """8 TFLOP a step: nine of 1 ms, then one of 91 ms that waits for all ten. 800 of 1000 TFLOP/s."""
    report = report_of(
        tmp_path / "a", num_ranks=1, num_steps=41, overlap=NOT_TIMED,
        step_ms=lambda rank, step: 91.0 if step % 10 == 9 else 1.0,
        run=run_record(1, flops_per_step=8e12, peak_flops=PEAK),
    )  # fmt: skip
    text = dataset_table(report.datasets["a"])
    assert re.search(r"^MFU, mean +80.0 %$", text, re.M)
    assert "above 100 %" not in text
    assert report.summary["datasets"]["a"]["steps"]["mfu"].median == pytest.approx(0.8)
    of_two = dataset("two", 2 * report.datasets["a"].runs)
    assert re.search(r"^MFU, mean +80.0 %$", dataset_table(of_two), re.M)
    again = shutil.copytree(tmp_path / "a", tmp_path / "b")
    twice = make_report([tmp_path / "a", again], ["two", "two"]).summary["datasets"]["two"]
    for one in (twice, *twice["runs"]):
        assert one["steps"]["mfu"].median == pytest.approx(0.8)


def test_ranks_of_one_tensor_parallel_group_share_their_tokens(tmp_path):
    layout = {"world": 2, "dp": 1, "tp": 2}
    found = load_run(
        run_of(
            tmp_path / "a", run=run_record(2, layout=layout), tokens=1000, step_ms=10.0, overlap=NOT_TIMED
        ),
        "a",
    )
    assert float(np.median(found.metrics["tokens_per_s"])) == pytest.approx(100_000)
    assert float(np.median(found.metrics["tokens_per_s_per_gpu"])) == pytest.approx(50_000)


@pytest.mark.parametrize(
    ("changes", "metric", "reason"),
    [
        pytest.param({"tokens": None}, "tokens_per_s", "no tokens", id="no-tokens"),
        pytest.param({}, "mfu", "FLOPs of a token are not known", id="no-flops"),
        pytest.param({"flops_per_token": 1e9}, "mfu", "peak rate of the device", id="no-peak"),
        pytest.param(
            {"flops_per_token": 1e9, "not_measured": {"peak_flops": "no file for it"}},
            "mfu",
            "no file for it",
            id="said-why",
        ),
        pytest.param({}, "power_w", "no telemetry", id="no-telemetry"),
        pytest.param({}, "peak_memory_bytes", "allocator", id="no-memory"),
    ],
)
def test_what_is_not_known_is_null_with_a_reason(tmp_path, changes, metric, reason):
    of_run = {name: value for name, value in changes.items() if name != "tokens"}
    of_records = {name: value for name, value in changes.items() if name == "tokens"}
    report = report_of(tmp_path / "a", run=run_record(2, **of_run), **of_records)
    found = report.summary["datasets"]["a"]
    assert found["steps"][metric].median is None
    assert reason in found["not_measured"][metric]


def test_an_impossible_mfu_is_said(tmp_path):
    run = run_record(2, flops_per_token=1e15, peak_flops=PEAK)
    assert "MFU is above 100 %" in dataset_table(report_of(tmp_path / "a", run=run).datasets["a"])


@pytest.mark.heavy
def test_unlike_batches_are_compared_by_work_per_time(tmp_path):
    """A step takes 4.74 times as long and holds 8 times the tokens: 1.69 times as fast."""
    a = run_of(tmp_path / "a", num_steps=30, compute=8.0, tokens=4)
    b = run_of(tmp_path / "b", num_steps=30, compute=4.74 * 10 - 2, tokens=32)
    report = make_report([a, b], ["a", "b"])
    found = report.comparison
    assert found.main == "tokens_per_s_per_gpu"
    assert found.work.ratio == 8
    assert found.headline.startswith("b is faster than a: ")
    assert "its step holds 8 times the tokens and takes 4.74 times as long" in found.headline
    assert found.metrics["tokens_per_s_per_gpu"].ratio == pytest.approx(8 / 4.74, rel=0.01)
    assert found.metrics["tokens_per_s_per_gpu"].verdict == "better"
    assert found.metrics["step_ms"].verdict == "different"
    assert not any(one.verdict == "worse" and one.unit == "ms" for one in found.metrics.values())
    # Taken apart for the same tokens: the parts still add up.
    parts = found.decomposition
    assert parts.step.candidate_ms == pytest.approx(47.4 / 8, rel=0.01)
    assert sum(part.candidate_ms for part in parts.parts) == pytest.approx(parts.step.candidate_ms)
    rows = [line.split("  ")[0] for line in comparison_table(found).splitlines()[2:]]
    assert rows.index("tokens/s per GPU") < rows.index("step")
    assert report.summary["main"] == "tokens_per_s_per_gpu"
    text = page(report)
    assert text.index(">tokens/s per GPU<") < text.index(">step, ms<")


@pytest.mark.heavy
def test_of_the_same_work_the_step_time_is_judged(tmp_path):
    a, b = (run_of(tmp_path / name, num_steps=30, tokens=4) for name in "ab")
    found = make_report([a, b], ["a", "b"]).comparison
    assert found.main == "step_ms"
    assert found.work is None
    assert found.metrics["tokens_per_s_per_gpu"].verdict == "not judged"
    assert found.metrics["tokens_per_s_per_gpu"].interval is not None


@pytest.mark.heavy
def test_unlike_batches_without_tokens_are_said(tmp_path):
    runs = [
        run_of(
            tmp_path / str(mbs),
            tokens=None,
            num_steps=30,
            run=run_record(2, layout={"world": 2, "dp": 2, "mbs": mbs, "seq": 8, "grad_accum": 1}),
        )
        for mbs in (1, 4)
    ]
    found = make_report(runs, ["a", "b"]).comparison
    assert any("the batches differ (8 and 32 tokens" in note for note in found.notes)


@pytest.mark.heavy
def test_the_gate_takes_rates_and_memory(tmp_path):
    budget = tmp_path / "budget.yaml"
    budget.write_text(
        "tokens_per_s: {min: 1}\nmfu: {min: 0.99}\npeak_memory_bytes: {max: 2.0e+9}\npower_w: {max: 800}\n"
    )
    run = run_record(2, flops_per_token=1e9, peak_flops=PEAK)
    memory = MemoryRecord(allocated_bytes=1, reserved_bytes=2, peak_allocated_bytes=10**9)
    report = report_of(
        tmp_path / "a", num_steps=30, run=run, tokens=1000, memory=memory, device=device(power_w=700)
    )
    states = {one.limit.metric: one.state for one in check_budget(load_budget(budget), report).checked}
    assert states == {"tokens_per_s": "met", "mfu": "violated", "peak_memory_bytes": "met", "power_w": "met"}


# ---- telemetry beside the steps


@pytest.mark.heavy
def test_a_clock_that_drops_is_in_the_ranks_row(tmp_path):
    report = report_of(tmp_path / "a", num_steps=31, device=hot)
    seen = report.summary["datasets"]["a"]["ranks"]["1"]["judged_steps"]
    assert seen["lowest_clock_mhz"] == 600
    assert seen["throttling"] == {"hw_thermal_slowdown": pytest.approx(1 / 3)}


# ---- what is lost, and who is late


@pytest.mark.heavy
def test_the_largest_loss_comes_first(tmp_path):
    report = report_of(tmp_path / "a", idle=30.0)
    found = report.datasets["a"]
    assert [loss.name for loss in losses(found)] == ["idle_ms", "exposed_ms"]
    assert re.match(r"a: a step takes 39.\d ms; 77 % of it is idle, 3 % is exposed", dataset_answer(found))


@pytest.mark.heavy
def test_who_comes_last_nearly_always_is_in_the_first_row(tmp_path):
    """Rank 1 comes 2 ms later to the only collective of each step."""
    report = report_of(tmp_path / "a", num_ranks=4, late=1)
    found = report.datasets["a"]
    worst = judged_ranks(found.first)[0]
    assert (worst.rank, worst.num_last, worst.num_judged) == (1, 11, 11)
    assert worst.caused_ms == pytest.approx(2.0, abs=0.01)


@pytest.mark.heavy
def test_of_many_ranks_the_late_one_is_shown_and_waits_are_known(tmp_path):
    """70 ranks: above what was once read again to find out who waits."""
    run = load_run(run_of(tmp_path / "a", num_ranks=70, num_steps=4, late=53), "a")
    report = make_report([tmp_path / "a"], ["a"])
    (shown,) = steps_to_show(report)
    assert 53 in shown.ranks
    waits = {call[0]: wait for call, wait in shown.waits.items()}
    assert waits[53] == pytest.approx(0, abs=1e-3)
    assert all(wait == pytest.approx(2.0, abs=1e-3) for rank, wait in waits.items() if rank != 53)
    (drawn,) = timeline_data([shown])["runs"]
    spans = [
        span
        for rank in next(iter(drawn["steps"].values()))["ranks"]
        for row in rank["rows"]
        if row["kind"] == "comm"
        for lane in row["lanes"]
        for span in lane
    ]
    assert {span[9] for span in spans} == {0.0, 2.0}
    text = page(report)
    heat = json.loads(re.search(r'id="heat-data">(.*?)</script>', text)[1].replace("\\u0026", "&"))
    assert len(heat[0]["ranks"]) == len(run.ranks) == 70
    assert heat[0]["ranks"][heat[0]["metrics"][0]["order"][0]] == 53


def test_an_operations_comm_and_exposed_time_are_rows_of_the_table(tmp_path):
    found = dataset("a", [judge(load_run(run_of(tmp_path / "a"), "a"))])
    lines = dataset_table(found).splitlines()
    (gathers,) = [line for line in lines if line.startswith("all_gather ")]
    assert gathers.split() == ["all_gather", "3.00", "ms", "1.00", "ms"]


def test_flops_of_a_step_need_no_tokens(tmp_path):
    """8 TFLOP take 10 ms or so: 800 TFLOP/s, four fifths of the peak."""
    run = run_record(flops_per_step=8e12, peak_flops=PEAK)
    loaded = load_run(run_of(tmp_path / "run", run=run), "run")
    step_ms = loaded.metrics["step_ms"]
    assert np.allclose(loaded.metrics["model_tflops_per_gpu"], 8e3 / step_ms)
    assert np.allclose(loaded.metrics["mfu"], 8.0 / step_ms)


@pytest.mark.parametrize(
    ("noted", "told"),
    [
        pytest.param("the model communicates in its forward pass", None, id="as-noted"),
        pytest.param(
            "the model does not run without data: RuntimeError: Tensor.item() cannot be called\nhere",
            "the model does not run without data",
            id="without-the-words-of-an-error",
        ),
    ],
)
def test_flops_that_could_not_be_counted_say_why(tmp_path, noted, told):
    run = run_record(not_measured={"flops_per_step": noted})
    loaded = load_run(run_of(tmp_path / "run", run=run), "run")
    assert loaded.not_measured["mfu"] == (told or noted)


def test_work_per_time_by_what_the_model_was_called_with_needs_no_word_of_the_program(tmp_path):
    """Of rank 0, times two ranks; lines that have tokens go first."""

    def metrics(name, tokens=None, **counted):
        program = {"wrappers": [{"kind": "DistributedDataParallel"}]}
        run = run_record(2, devices=[GPU] * 2, program=program, **counted)
        return load_run(run_of(tmp_path / name, run=run, tokens=tokens), name).metrics

    seen = metrics("seen", tokens_per_step=500)
    assert np.allclose(seen["tokens_per_s"], 1e6 / seen["step_ms"])
    assert np.allclose(seen["tokens_per_s_per_gpu"], 5e5 / seen["step_ms"])
    told = metrics("told", tokens=1000, tokens_per_step=500)
    assert np.allclose(told["tokens_per_s"], 2e6 / told["step_ms"])
    images = metrics("images", samples_per_step=64)
    assert np.allclose(images["samples_per_s"], 128e3 / images["step_ms"])
    assert np.isnan(images["tokens_per_s"]).all()
    assert "samples/s" in dataset_table(make_report([tmp_path / "images"], ["a"]).datasets["a"])


@pytest.mark.parametrize("name", ["tokens", "samples"])
def test_ranks_that_may_share_a_batch_have_no_work_per_time(tmp_path, name):
    """The program's own tensor parallelism: nothing tells that both ranks work on the same rows."""

    def loaded(label, num_ranks, **of_run):
        run = run_record(num_ranks, devices=[GPU] * num_ranks, **{f"{name}_per_step": 500}, **of_run)
        return load_run(run_of(tmp_path / label, num_ranks, run=run, tokens=None), label)

    unknown = loaded("unknown", 2)
    assert np.isnan(unknown.metrics[f"{name}_per_s"]).all()
    assert unknown.not_measured[f"{name}_per_s"].startswith("ranks may work on the same samples")
    for known in (loaded("told", 2, layout={"world": 2, "dp": 1}), loaded("alone", 1)):
        assert np.allclose(known.metrics[f"{name}_per_s"], 5e5 / known.metrics["step_ms"])


def test_tokens_of_a_cpu_s_rank_are_no_gpu_s(tmp_path):
    folder = runs.run_of(tmp_path, lambda rank, step, noise: (runs.plain(noise), {"tokens": 1000}))
    text = dataset_table(dataset("a", [judge(load_run(folder, "a"))]))
    assert "compute: host time" in text
    assert "tokens/s per rank" in text
    assert "per GPU" not in text
