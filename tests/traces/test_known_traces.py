"""Real traces against what an independent interval calculation gives for them."""

from functools import cache

import pytest

from aorta.account.load.open import load_run
from aorta.timeline.overlap import overlap, total
from aorta.timeline.types import Kind
from aorta.traces.classify import COPY_KERNEL
from aorta.traces.model import RankTrace
from aorta.traces.quality import verdict
from aorta.traces.sources import open_source
from aorta.traces.steps import Reading
from tests.larger_data import FOLDER, TRACES, needs_data

pytestmark = needs_data(TRACES)
FOREIGN = FOLDER / "traces_foreign"
H200 = "h200_fsdp4_rank{}.json.gz"
A100 = "a100_rank3of8_kineto.json.gz"
MI300X = "mi300x_resnet_ddp_rank0of8_kineto.json.gz"
MI350X_FSDP = "mi350x_fsdp_rocprofv3.json.gz"
MI350X = "mi350x_single_nocomm_kineto.json"
LAST_DIGIT = 0.00051
"""Half of the last printed digit of a number in ms, and the rounding of the sum."""


@cache
def trace(name: str) -> RankTrace:
    source = open_source(TRACES / name)
    return source.read(source.ranks[0])


@cache
def dlrm() -> list[RankTrace]:
    source = open_source(TRACES / "v100_dlrm_8ranks_kineto.tar.gz")
    assert source.ranks == list(range(8))
    return [source.read(rank) for rank in source.ranks]


@pytest.mark.parametrize(
    ("name", "rank", "kernels", "collectives", "span_ms", "comm_ms", "compute_ms", "hidden_ms"),
    [
        (H200.format(0), 0, 860, 28, 196.784, 74.969, 161.805, 41.756),
        (H200.format(1), 1, 860, 28, 196.788, 67.916, 163.190, 36.111),
        (H200.format(2), 2, 860, 28, 196.355, 69.757, 162.434, 38.021),
        (H200.format(3), 3, 860, 28, 196.781, 77.506, 160.760, 43.383),
        (A100, 3, 8568, 60, 464.594, 163.535, 281.336, 75.614),
        (MI300X, 0, 2995, 17, 86.568, 71.517, 25.739, 15.891),
        (MI350X, 0, 20, 0, 0.761, 0.0, 0.265, 0.0),
    ],
)
def test_total(name, rank, kernels, collectives, span_ms, comm_ms, compute_ms, hidden_ms):
    whole = trace(name)
    result = total(whole.timeline)
    assert whole.rank == rank
    assert (result.num_kernels, result.num_collectives) == (kernels, collectives)
    assert result.span_ms == pytest.approx(span_ms, abs=LAST_DIGIT)
    assert result.comm_ms == pytest.approx(comm_ms, abs=LAST_DIGIT)
    assert result.compute_ms == pytest.approx(compute_ms, abs=LAST_DIGIT)
    assert result.hidden_ms == pytest.approx(hidden_ms, abs=LAST_DIGIT)


@pytest.mark.heavy
def test_dlrm_totals():
    results = [total(one.timeline) for one in dlrm()]
    assert [r.num_collectives for r in results] == [8] * 8
    assert [r.num_kernels for r in results] == [245, 310, 246, 315, 251, 245, 246, 246]
    comm = [5.798, 11.336, 3.492, 9.774, 6.587, 6.251, 3.558, 1.746]
    compute = [1.034, 1.246, 1.068, 1.240, 1.126, 1.041, 1.051, 1.059]
    hidden = [0.261, 0.280, 0.275, 0.324, 0.037, 0.040, 0.269, 0.166]
    assert [r.comm_ms for r in results] == pytest.approx(comm, abs=LAST_DIGIT)
    assert [r.compute_ms for r in results] == pytest.approx(compute, abs=LAST_DIGIT)
    assert [r.hidden_ms for r in results] == pytest.approx(hidden, abs=LAST_DIGIT)


def test_dlrm_ratios():
    expected = [4.50, 2.47, 7.88, 3.31, 0.56, 0.64, 7.56, 9.51]
    ratios = [100 * overlap(one.timeline).overlap_ratio for one in dlrm()]
    assert ratios == pytest.approx(expected, abs=0.0051)


def test_dlrm_collectives_end_together_and_start_apart():
    """Ends within 1 to 7 µs; the last to arrive is rank 7, then 5, then 4; operations from ranges."""
    ranks = dlrm()
    assert [c.op for c in ranks[0].collectives].count("all_to_all") == 5
    last = []
    for row in zip(*(one.collectives for one in ranks), strict=True):
        assert len({c.op for c in row}) == 1
        starts = [
            one.timeline.origin_unix_ns + round(c.start_ms * 1e6) for one, c in zip(ranks, row, strict=True)
        ]
        ends = [
            one.timeline.origin_unix_ns + round(c.end_ms * 1e6) for one, c in zip(ranks, row, strict=True)
        ]
        assert 1_000 <= max(ends) - min(ends) <= 7_000
        last.append(starts.index(max(starts)))
    assert last == [7, 7, 7, 7, 7, 5, 5, 4]


@pytest.mark.heavy
def test_rocprofv3():
    """43 915 kernels, 1310 of them RCCL's; without the 6366 that only copy compute is 258.66 ms."""
    whole = trace(MI350X_FSDP)
    line = whole.timeline
    sums = total(line)
    assert (sums.num_kernels, sums.num_collectives) == (43_915, 1310)
    assert sums.span_ms == pytest.approx(15_122, abs=0.5)
    assert sums.comm_ms == pytest.approx(4158.76, abs=0.0051)
    assert sums.compute_ms == pytest.approx(281.68, abs=0.0051)
    assert sums.hidden_ms == pytest.approx(207.33, abs=0.0051)
    assert 100 * overlap(line).overlap_ratio == pytest.approx(4.985, abs=0.00051)
    copies = (line.kind == Kind.COMPUTE) & (line.op == line.ops.index(COPY_KERNEL))
    assert int(copies.sum()) == whole.quality.num_copy_kernels == 6366
    without = total(line.select(~copies))
    assert without.compute_ms == pytest.approx(258.66, abs=0.0051)
    assert without.hidden_ms == pytest.approx(196.05, abs=0.0051)
    assert (len(line.streams), whole.device) == (567, "AMD Instinct MI350X")
    assert whole.steps == []
    assert any(
        "1310 of 1310 collectives (100.0 % of their time) is unknown" in f.text for f in verdict(whole)
    )


def test_no_communication_has_no_ratio():
    assert overlap(trace(MI350X).timeline).overlap_ratio is None


def test_steps_of_a_gpu_that_runs_behind():
    """The GPU is 30 ms late when the trace starts: 757 kernels belong to the total and to no step."""
    late = trace(MI300X)
    assert [step.step for step in late.steps] == [15, 16, 17]
    outside = late.timeline.select(late.launch_step < 0)
    assert total(outside).num_kernels == 757
    assert late.steps[0].window_ms[0] > 30.0
    assert [total(step).num_kernels for step in late.steps] == [746, 746, 746]
    assert [total(step).num_collectives for step in late.steps] == [4, 4, 4]
    assert late.quality.num_unknown_collectives == 5


@pytest.mark.parametrize("name", [H200.format(0), A100, MI300X])
def test_step_windows_meet_and_hold_their_step_alone(name):
    """Here no work crosses a step's edge: by launch and by time gives the same."""
    whole = trace(name)
    for a, b in zip(whole.steps, whole.steps[1:], strict=False):
        assert a.window_ms[1] == b.window_ms[0]
    for step in whole.steps:
        by_time = overlap(whole.timeline.clipped(*step.window_ms))
        by_launch = overlap(step)
        assert by_launch.comm_ms == pytest.approx(by_time.comm_ms, abs=1e-9)
        assert by_launch.hidden_ms == pytest.approx(by_time.hidden_ms, abs=1e-9)


def test_collectives_carry_the_metadata_of_the_trace():
    gather = trace(H200.format(0)).collectives[0]
    assert (gather.op, gather.step, gather.dtype, gather.group) == ("all_gather", 0, "BFloat16", "0")
    assert gather.bytes == 1050677248 * 2
    assert gather.ranks == [0, 1, 2, 3]
    linked = [c for c in trace(MI300X).collectives if c.op == "all_reduce"]
    assert [c.bytes for c in linked][:2] == [2873320 * 2, 8816192 * 2]


def test_versions():
    assert trace(H200.format(0)).versions["nccl"] == "2.28.9"
    assert trace(MI300X).versions["hip_runtime"] == "60443483"


def test_the_compute_stream_is_the_one_that_computes_longest():
    whole = trace(H200.format(0)).timeline
    assert {whole.streams[i] for i in whole.compute_streams} == {"7"}


@pytest.mark.heavy
@needs_data(FOREIGN)
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        # ProfilerStep#4 to 6 around DDP's steps of 220 ms; rank 1 was not published.
        ("a100_rank0of2_kineto.json.gz", [4, 5, 6]),
        # One execute_context, a prefill of 888 tokens by 18 layers of 42 kernels, and its sampling.
        ("b200_vllm_eager_rank0of8_kineto.json.gz", [0]),
        # ProfilerStep#6, a forward pass by 24 layers, behind half of the one before, whose launches were not
        # traced.
        ("h100_qwen_kineto.json.gz", [6]),
        ("mi300x_qwen_kineto.json.gz", [6]),
        # ProfilerStep#1 around a forward and a backward pass that hide each other's exchanges.
        ("h800_deepseek_v3_train_rank0of64_kineto.json.gz", [1]),
        # 562 kernels of which nothing marks or repeats a step.
        ("mi210_gpu_only_kineto.json.gz", [0]),
        # Two marks; all work is in the first, 9.3 ms with the start of the program, the second is a rest.
        ("mi250_toy_kineto.json.gz", [1]),
        # One step[DECODE bs=32], 36 layers of 15 kernels in one graph.
        ("mi300x_sglang_decode_kineto.json.gz", [0]),
        # Two steps of two of the ranks.
        ("ranks_0_1_of_128", [551, 552]),
        # Six steps of ResNet-50, marked by the profiler; the two differ in their loaders' workers.
        ("v100_resnet50_workers0_kineto.json.gz", [5, 6, 7, 8, 9, 10]),
        ("v100_resnet50_workers4_kineto.json.gz", [5, 6, 7, 8, 9, 10]),
    ],
)
def test_the_steps_of_public_traces(name, steps):
    run = load_run(FOREIGN / name, "x", reading=Reading())
    assert run.global_step.tolist() == steps
    assert any("the whole trace counts as one step" in note for note in run.notes) == (steps == [0])
