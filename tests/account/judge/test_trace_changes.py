"""Two traces made by hand whose differences are known."""

import csv
import json

import pytest
from click.testing import CliRunner

from aorta.account.judge.trace_changes import certainty, trace_changes
from aorta.cli import main
from aorta.traces.inventory import rank_inventory
from aorta.traces.sources import open_source
from aorta.traces.steps import Reading
from tests.traces.kineto_events import kernel, launch, mark

STEP_US = 1000


def operator(ts, dur, name, dims):
    event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 100, "tid": 1, "ts": ts, "dur": dur}
    return event | {"args": {"Input Dims": dims}}


def module(ts, dur, name):
    event = {"ph": "X", "cat": "python_function", "pid": 100, "tid": 1, "ts": ts, "dur": dur}
    return event | {"name": f"nn.Module: {name}"}


def trace(path, kernels, num_steps=4, jitter=(0, 1, 2, 1, 0, 2, 1)):
    """kernels: (name, µs, operator, dims, module) in order; each under an operator in a module."""
    events, correlation = [], 0
    for step in range(num_steps):
        at = 10_000 + step * STEP_US
        events.append(mark(at, STEP_US - 1, f"ProfilerStep#{step}"))
        for place, (name, us, op, dims, owner) in enumerate(kernels):
            correlation += 1
            start = at + 10 + 40 * place
            if op:
                events += [module(start - 2, 20, owner), operator(start - 1, 10, op, dims)]
            events.append(launch(start, correlation))
            events.append(kernel(start + 10, us + jitter[step], correlation, name=name))
    header = {"distributedInfo": {"rank": 0, "world_size": 1}}
    path.write_text(json.dumps(header | {"traceEvents": events}))
    return path


def compared(*paths):
    sides = [[rank_inventory(open_source(path), 0, Reading())] for path in paths]
    return trace_changes(*sides)


MM = ("aten::mm", [[64, 128], [128, 256]], "Linear_0")
ADD = ("aten::add", [[64, 256], [64, 256]], "Block_0")


def test_same_work_that_got_slower(tmp_path):
    """100 to 130 µs with steps of 0 to 2 µs of jitter: 0.030 ms apart in all of 4 and 4 steps, 1 in 35."""
    before = trace(tmp_path / "a.json", [("gemm_a", 100, *MM), ("vectorized_add", 20, *ADD)])
    after = trace(tmp_path / "b.json", [("gemm_a", 130, *MM), ("vectorized_add", 20, *ADD)])
    found = compared(before, after)
    row = found.of_table("kernel")[0]
    assert (row.reference, row.candidate, row.matched_by) == ("gemm_a", "gemm_a", "all")
    assert (row.operator, row.shapes, row.module) == ("aten::mm", "64x128, 128x256", "Linear_0")
    assert row.difference_ms == pytest.approx(0.030)
    assert (row.reference_ms, row.reference_range) == (pytest.approx(0.101), pytest.approx((0.100, 0.102)))
    assert row.certainty == "apart (by chance 1 in 35)"
    unchanged = found.of_table("kernel")[1]
    assert (unchanged.difference_ms, unchanged.certainty) == (0, "within the spread of steps")
    by_class = {row.reference: row.difference_ms for row in found.of_table("class")}
    assert by_class == {"gemm": pytest.approx(0.030), "elementwise": 0}
    assert found.of_table("operator")[0].reference == "aten::mm"


def test_another_kernel_for_the_same_operator_and_shapes(tmp_path):
    """A library's kernel of another name: ROCm's against CUDA's."""
    before = trace(tmp_path / "a.json", [("cutlass_80_gemm", 100, *MM)])
    after = trace(tmp_path / "b.json", [("Cijk_Ailk_Bljk", 80, *MM)])
    (row,) = compared(before, after).of_table("kernel")
    assert (row.reference, row.candidate) == ("cutlass_80_gemm", "Cijk_Ailk_Bljk")
    assert row.matched_by == "operator and shapes"
    assert row.difference_ms == pytest.approx(-0.020)


def test_an_operator_of_all_layers_is_one_row(tmp_path):
    """Two layers do the same work: 0.2 ms of two launches against 0.3 ms, by whatever kernel."""
    layers = [(*MM[:2], f"Linear_{i}") for i in (0, 1)]
    before = trace(tmp_path / "a.json", [("flash_fwd_kernel", 100, *one) for one in layers])
    after = trace(tmp_path / "b.json", [("attn_fwd", 150, *one) for one in layers])
    found = compared(before, after)
    (row,) = found.of_table("operator")
    assert (row.reference_count, row.candidate_count) == (2, 2)
    assert row.difference_ms == pytest.approx(0.1)
    assert row.module == "Linear_0 | Linear_1"
    assert {one.reference for one in found.of_table("class")} == {"attention"}


def test_without_operators_the_order_of_a_step_tells(tmp_path):
    """Two GEMMs of other names on the other side: the first belongs to the first."""
    nothing = ("", None, "")
    before = [
        ("cutlass_gemm_p", 100, *nothing),
        ("layer_norm", 5, *nothing),
        ("cutlass_gemm_q", 30, *nothing),
    ]
    after = [("Cijk_x", 90, *nothing), ("layer_norm", 5, *nothing), ("Cijk_y", 50, *nothing)]
    found = compared(trace(tmp_path / "a.json", before), trace(tmp_path / "b.json", after))
    pairs = {(row.reference, row.candidate): row for row in found.of_table("kernel")}
    assert pairs["cutlass_gemm_p", "Cijk_x"].difference_ms == pytest.approx(-0.010)
    assert pairs["cutlass_gemm_q", "Cijk_y"].difference_ms == pytest.approx(0.020)
    assert pairs["cutlass_gemm_q", "Cijk_y"].matched_by == "order"
    assert any("no operators" in note for note in found.notes)


def test_other_shapes_fewer_launches_and_work_of_one_side(tmp_path):
    wide = ("aten::mm", [[128, 128], [128, 256]], "Linear_0")
    before = [("gemm_a", 100, *MM), ("gemm_a", 100, *MM), ("index_kernel", 7, "aten::index", [[9]], "")]
    after = [("gemm_a", 150, *wide), ("fmha_fwd", 9, "aten::sdpa", [[8, 8]], "")]
    found = compared(trace(tmp_path / "a.json", before), trace(tmp_path / "b.json", after))
    gemm = next(row for row in found.of_table("kernel") if row.reference == "gemm_a")
    assert (gemm.matched_by, gemm.reference_count, gemm.candidate_count) == ("name", 2, 1)
    assert gemm.shapes == "64x128, 128x256 -> 128x128, 128x256"
    alone = {row.reference or row.candidate: row for row in found.of_table("kernel") if row is not gemm}
    assert {row.matched_by for row in alone.values()} == {"one side only"}
    assert (alone["fmha_fwd"].reference_ms, alone["index_kernel"].candidate_ms) == (None, None)
    total = sum(row.difference_ms for row in found.of_table("class"))
    assert total == pytest.approx(sum(row.difference_ms for row in found.of_table("kernel")))


def test_collectives_by_operation_and_bytes(tmp_path):
    def of(name, us, nelems):
        call = mark(10_001, 400, "record_param_comms", cat="cpu_op")
        call["args"] = {
            "Collective name": "allreduce", "In msg nelems": nelems, "Out msg nelems": nelems,
            "dtype": "Float", "Process Group Name": "0", "External id": 5,
        }  # fmt: skip
        events = [
            mark(10_000, 900, "ProfilerStep#0"), call, launch(10_002, 1, **{"External id": 5}),
            kernel(10_050, us, 1, name="ncclDevKernel_AllReduce_Sum_f32", **{"External id": 5}),
            launch(10_500, 2), kernel(10_600, 10, 2),
        ]  # fmt: skip
        path = tmp_path / name
        path.write_text(json.dumps({"distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": events}))
        return path

    (row,) = compared(of("a.json", 100, 1024), of("b.json", 160, 1024)).of_table("collective")
    assert (row.reference, row.matched_by) == ("all_reduce", "all")
    assert row.difference_ms == pytest.approx(0.060)
    assert row.certainty == "one step: its spread is not known"


@pytest.mark.parametrize(
    ("num", "word"),
    [(1, "one step: its spread is not known"), (2, "apart, too few steps to be sure (by chance 1 in 3)")],
)
def test_few_steps_are_said_to_be_few(tmp_path, num, word):
    before = trace(tmp_path / "a.json", [("gemm_a", 100, *MM)], num)
    after = trace(tmp_path / "b.json", [("gemm_a", 130, *MM)], num)
    found = compared(before, after)
    assert found.of_table("kernel")[0].certainty == word


def test_certainty_counts_the_ways_steps_can_fall():
    import numpy as np

    slow, fast = np.arange(10.0, 17.0), np.arange(7.0)
    assert certainty(fast, slow) == "apart (by chance 1 in 1716)"
    assert certainty(fast, fast) == "within the spread of steps"
    assert certainty(None, fast) == "on one side only"


@pytest.mark.heavy
def test_compare_prints_and_writes_it(tmp_path):
    before = trace(tmp_path / "a.json", [("=gemm_a", 100, *MM)])
    after = trace(tmp_path / "b.json", [("=gemm_a", 130, *MM)])
    quick = ["--no-page"]
    done = CliRunner().invoke(main, ["compare", str(before), str(after), "-o", str(tmp_path / "out"), *quick])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["changes.csv", "summary.json"]
    assert "kernels by class" in done.output
    rows = list(csv.DictReader((tmp_path / "out" / "changes.csv").open()))
    kernel_row = next(row for row in rows if row["table"] == "kernel")
    assert float(kernel_row["difference_ms"]) == pytest.approx(0.030)
    assert kernel_row["reference"] == "'=gemm_a", "no formula in a spreadsheet"
