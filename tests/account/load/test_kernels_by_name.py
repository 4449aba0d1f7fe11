"""Kernels by name in reports and comparisons, worked out by hand."""

import numpy as np
import pytest

from aorta.account.judge.judged import dataset, judge
from aorta.account.judge.kernels import kernels_by_class, kernels_by_name
from aorta.account.load.open import load_run
from aorta.account.load.rank.kernels import NamedKernels
from aorta.page.html import page
from aorta.page.table import comparison_table, dataset_table
from aorta.page.write import make_report
from aorta.records.files import kernels_name
from aorta.records.schema import KernelNames, KernelSpan, KernelSums
from aorta.records.table import LineTable
from aorta.records.writer import write_json
from tests.records import plain_records
from tests.records.run_folders import run_record, step_record, step_timeline, write_run

NAMES = ["", "gemm_128x256", "void at::native::vectorized_elementwise_kernel<4, AddFunctor<float> >(int)",
         "void at::native::vectorized_elementwise_kernel<8, AddFunctor<float> >(int)"]  # fmt: skip
ADD = "vectorized_elementwise_kernel (AddFunctor)"


def sums(*top, num_unlisted=0, num_graph_nodes=0):
    num = sum(count for _, _, count in top)
    return KernelSums(
        num_kernels=num + num_unlisted,
        num_graph_nodes=num_graph_nodes,
        classes={"gemm": (sum(ms for _, ms, _ in top), num)},
        top=list(top),
    )


def columns_of(*rows, names=NAMES):
    named = NamedKernels()
    named.add(0, LineTable([plain_records.step(i, kernels=kernels) for i, kernels in enumerate(rows)]))
    return named.columns(names, len(rows))


def test_kernels_that_read_alike_are_one():
    columns = columns_of(sums((1, 5.0, 10), (2, 1.0, 3), (3, 0.5, 1)))
    assert columns["kernel_name_ms.gemm_128x256"].tolist() == [5.0]
    assert columns[f"kernel_name_ms.{ADD}"].tolist() == [1.5]
    assert columns[f"kernel_name_count.{ADD}"].tolist() == [4.0]


def test_what_a_whole_list_lacks_took_no_time_and_what_a_part_lacks_is_not_known():
    whole, part = sums((1, 5.0, 10)), sums((1, 5.0, 10), num_unlisted=2)
    columns = columns_of(sums((1, 5.0, 10), (2, 1.0, 3)), whole, part, None)
    np.testing.assert_array_equal(columns[f"kernel_name_ms.{ADD}"], [1.0, 0.0, np.nan, np.nan])
    np.testing.assert_array_equal(columns["kernel_name_ms.gemm_128x256"], [5.0, 5.0, 5.0, np.nan])


def test_one_of_two_that_read_alike_is_not_both():
    columns = columns_of(sums((2, 1.0, 3), (3, 0.5, 1)), sums((2, 1.0, 3), num_unlisted=1))
    np.testing.assert_array_equal(columns[f"kernel_name_ms.{ADD}"], [1.5, np.nan])


@pytest.mark.parametrize("names", [[], [""]], ids=["no-file", "short-file"])
def test_indices_without_a_name_are_left_out(names):
    assert columns_of(sums((1, 5.0, 10)), names=names) == {}


def run_of(folder, gemm_ms=5.0, num_gemms=10, num_steps=30, names=NAMES, seed=0, num_graph_nodes=0):
    """Steps of kernel lines on one rank; times scatter by 1 %."""
    draw = np.random.default_rng(seed)
    records = []
    for step in range(num_steps):
        gemm, add = np.array([gemm_ms, 1.0]) * draw.normal(1.0, 0.01, 2)
        line = step_record(
            step_timeline(step=step, source="kernels"), 1,
            kernels=sums((1, float(gemm), num_gemms), (2, float(add), 3), num_graph_nodes=num_graph_nodes),
        )  # fmt: skip
        records.append(line)
    write_run(folder, records, run_record(1))
    write_json(folder / kernels_name(0), KernelNames(names=list(names)))
    return folder


@pytest.mark.heavy
def test_a_report_lists_kernels_by_name(tmp_path):
    report = make_report([run_of(tmp_path / "a")], ["a"])
    text = dataset_table(report.datasets["a"])
    assert text.index("gemm_128x256") < text.index(ADD)
    assert "gemm_128x256" in page(report)


def test_kernels_of_a_report_are_means_as_the_cells_are(tmp_path):
    """Two steps of three have 2 ms of a gather, one has 20: 8 ms in the mean, 2 in the median."""
    gather = "ncclDevKernel_AllGather_RING_LL"
    lines = [
        step_record(
            step_timeline(step=step, source="kernels"), 1,
            kernels=KernelSums(num_kernels=1, classes={"communication": (ms, 1)}, top=[(1, ms, 1)]),
        )
        for step, ms in enumerate([2.0, 20.0, 2.0])
    ]  # fmt: skip
    write_run(tmp_path, lines, run_record(1))
    write_json(tmp_path / kernels_name(0), KernelNames(names=["", gather]))
    of_run = dataset("a", [judge(load_run(tmp_path, "a"), 0)])
    [of_class], [of_name] = kernels_by_class(of_run), kernels_by_name(of_run)
    assert (of_class.name, of_class.time_ms, of_class.count) == ("communication", 8.0, 1.0)
    assert (of_name.name, of_name.time_ms, of_name.count) == (gather, 8.0, 1.0)


@pytest.mark.heavy
def test_the_kernel_that_got_slower_is_named_and_the_others_are_not(tmp_path):
    report = make_report(
        [run_of(tmp_path / "a"), run_of(tmp_path / "b", gemm_ms=6.0, num_gemms=12, seed=1)], ["a", "b"]
    )
    metrics = report.comparison.metrics
    gemm = metrics["kernel_name_ms.gemm_128x256"]
    assert gemm.verdict == "worse"
    assert gemm.ratio == pytest.approx(1.2, rel=0.01)
    assert gemm.p_adjusted is not None  # in the family of all that is judged
    assert metrics[f"kernel_name_ms.{ADD}"].verdict in ("same", "cannot tell")
    [row] = [line for line in comparison_table(report.comparison).splitlines() if "gemm_128x256" in line]
    assert "worse" in row
    assert "10 to 12 launches" in row


@pytest.mark.heavy
def test_kernels_of_other_names_are_compared_by_class_alone(tmp_path):
    theirs = ["", "Cijk_Ailk_MT128", "void add_kernel(int)"]
    report = make_report([run_of(tmp_path / "a"), run_of(tmp_path / "b", names=theirs)], ["a", "b"])
    metrics = report.comparison.metrics
    assert metrics["kernel_ms.gemm"].verdict in ("same", "cannot tell")
    assert metrics["kernel_name_ms.gemm_128x256"].verdict == "not judged"
    assert metrics["kernel_name_ms.gemm_128x256"].reason == (
        "b: no kernel of this name is among those with most time"
    )


def test_a_broken_file_of_names_takes_nothing_else_away(tmp_path):
    folder = run_of(tmp_path / "a")
    (folder / kernels_name(0)).write_bytes(b"{not json")
    judged = judge(load_run(folder, "a"))
    assert judged.statistics["kernel_ms.gemm"].median is not None
    assert not [name for name in judged.statistics if name.startswith("kernel_name_")]


@pytest.mark.heavy
def test_graphs_are_counted_and_what_their_records_cost_is_said(tmp_path):
    """1000 nodes of 0.5 us in a step of 10 ms."""
    with_graphs = make_report([run_of(tmp_path / "a", num_graph_nodes=1000)], ["a"]).datasets["a"]
    text = dataset_table(with_graphs)
    assert "1,000 kernels and copies of a step are nodes of graphs" in text
    assert "0.500 ms a step at most, 5.0 % of it" in text
    without = make_report([run_of(tmp_path / "b")], ["b"]).datasets["b"]
    assert "CUDA graphs" not in dataset_table(without)


def test_the_picture_has_the_kernels_of_the_steps_that_keep_them_all(tmp_path):
    gather = "ncclDevKernel_AllGather_RING_LL"
    kernels = KernelSums(
        num_kernels=2, classes={}, top=[(1, 2.0, 1), (2, 1.0, 1)],
        spans=[KernelSpan(0.0, 2.0, 7, 1), KernelSpan(1.0, 1.0, 20, 2)],
    )  # fmt: skip
    line = step_record(step_timeline(source="kernels"), 1, kernels=kernels)
    write_run(tmp_path, [line], run_record(1))
    write_json(tmp_path / kernels_name(0), KernelNames(names=["", NAMES[2], gather]))
    assert list(load_run(tmp_path, "a").kernels(0)) == [(0, [(0.0, 2.0, ADD)])]
