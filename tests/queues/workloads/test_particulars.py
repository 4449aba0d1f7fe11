"""What single workloads promise beyond the common."""

import pytest
import torch
import torch.distributed as dist

from aorta.errors import ConfigError
from aorta.queues.options import read_options
from aorta.queues.workload import Piece
from aorta.queues.workloads import find, workloads
from aorta.queues.workloads.comms_compute_overlap import OverlapOptions
from aorta.queues.workloads.graph_subgraphs import SubgraphOptions
from aorta.queues.workloads.hetero_kernels import HeteroOptions
from aorta.queues.workloads.inputs_and_checks import TensorComparison, check, product_comparison
from aorta.queues.workloads.ordering import stage_stream
from tests.queues.workloads.driver import driven

EXPECTED = {
    "P0": {"hetero_kernels", "tiny_kernel_stress", "large_gemm_only"},
    "P1": {"comms_compute_overlap", "moe"},
    "P2": {"graph_subgraphs"},
    "P3": {"async_dataload"},
}


@pytest.mark.parametrize("priority", EXPECTED)
def test_priorities(priority: str):
    """Of the workloads that come with the tool; others may be added."""
    assert {name for name, kind in workloads().items() if kind.priority == priority} >= EXPECTED[priority]


@pytest.mark.parametrize("name", workloads())
def test_a_workload_says_what_it_asks(name: str):
    kind = find(name)
    assert kind.question.endswith("?")
    assert len(kind.stream_meaning) > 20
    assert 1 <= kind.min_streams < kind.max_streams <= 64
    assert kind.__module__ == f"aorta.queues.workloads.{name}"


class TestCommsComputeOverlap:
    kind = find("comms_compute_overlap")

    @pytest.mark.parametrize(
        ("num_streams", "options", "comm", "compute"),
        [
            pytest.param(4, {}, [0], [1, 2, 3], id="all-but-one-compute"),
            pytest.param(4, {"compute_streams": 2, "num_coll": 3}, [0, 1], [2, 3], id="rotating"),
            pytest.param(4, {"compute_streams": 1}, [0], [3], id="two-left-over"),
            pytest.param(3, {"mode": "compute_only"}, [], [0, 1, 2], id="compute-only"),
            pytest.param(3, {"mode": "comms_only", "num_coll": 2}, [0, 1], [], id="comms-only"),
        ],
    )
    def test_streams_of_each_side(self, num_streams, options, comm, compute):
        with driven(self.kind, num_streams, OverlapOptions(**options)) as ran:
            ran.iterate(1)
            assert sorted(ran.pieces) == comm + compute
            assert (ran.workload.comm_streams, ran.workload.compute_streams) == (comm, compute)
            assert ran.workload.validate_correctness().ok
            unused = num_streams - len(comm) - len(compute)
            assert ran.workload.metrics()["num_unused_streams"] == unused
            assert bool(ran.workload.notes()) == bool(unused)

    def test_collectives_take_turns_on_their_streams(self):
        options = OverlapOptions(compute_streams=1, num_coll=5, num_compute=4)
        with driven(self.kind, 3, options) as ran:
            ran.iterate(1)
            assert ran.pieces == {0: 3, 1: 2, 2: 4}
            assert ran.names == {"comm all_reduce": 5, "gemm": 4}

    def test_legs_are_the_sides_alone_and_one_after_the_other(self):
        with driven(self.kind, 3, OverlapOptions(num_compute=4, num_coll=2)) as ran:
            names = {}
            for leg, work in ran.workload.legs().items():
                ran.names.clear()
                ran.iterate(1, work=work)
                names[leg] = dict(ran.names)
        both = {"comm all_reduce": 2, "gemm": 4}
        assert names == {"compute": {"gemm": 4}, "comm": {"comm all_reduce": 2}, "serial": both}

    @pytest.mark.parametrize(
        ("num_streams", "options", "reason"),
        [
            (2, {"compute_streams": 2}, "has room for 1 at most"),
            (2, {"compute_streams": 1, "mode": "comms_only"}, "has room for 0 at most"),
            (8, {"num_compute": 3}, "7 compute streams and only 3 GEMMs; ask for --streams 4 or fewer"),
            (2, {"comm_size": 2}, "--comm-size 2 is less than an element for each rank, 4 bytes"),
        ],
    )
    def test_what_cannot_be_is_refused(self, num_streams, options, reason):
        assert reason in self.kind.refusal(num_streams, OverlapOptions(**options), "cpu", 2)

    def test_groups_must_hold_all_ranks(self):
        with pytest.raises(ConfigError, match="each of the 4 ranks exactly once"):
            self.kind.refusal(2, OverlapOptions(process_groups=((0, 1),)), "cpu", 4)

    def test_real_collectives_need_a_process_group(self):
        options = OverlapOptions(real_collectives=True)
        with pytest.raises(ConfigError, match="torchrun"), driven(self.kind, 2, options):
            pass

    def test_real_collectives_that_are_not_wanted_are_refused(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        options = OverlapOptions(real_collectives=False)
        try:
            refused = pytest.raises(ConfigError, match="without torchrun")
            with refused, driven(self.kind, 2, options, group=dist.group.WORLD):
                pass
        finally:
            dist.destroy_process_group()

    def test_the_documented_command_line_parses(self):
        given = {
            "comm_size": "128M", "mm_dim": "4096,4096,4096", "num_compute": "10", "compute_streams": "2",
            "comp_dtype": "bfloat16", "comm_dtype": "bfloat16", "process_groups": "[0,1,2,3],[4,5,6,7]",
            "async_op": True, "real_collectives": True, "num_coll": "2", "collective": "all_to_all",
        }  # fmt: skip
        options = read_options(OverlapOptions, given)
        assert self.kind.refusal(4, options, "cuda", 8) is None

    def test_dims_of_a_gemm_need_not_be_equal(self):
        with driven(self.kind, 2, OverlapOptions(mm_dim=(8, 24, 16), num_compute=2)) as ran:
            ran.iterate(1)
            assert ran.workload.outputs["gemm1"].shape == (8, 24)
            assert ran.workload.validate_correctness().ok
            assert ran.workload.metrics()["compute_tflop"] == pytest.approx(2 * 2 * 8 * 24 * 16 / 1e12)


class TestHeteroKernels:
    kind = find("hetero_kernels")

    def test_delays_come_from_the_pieces_of_two_legs(self):
        """A tiny kernel takes 10 us alone; beside large ones it ends 5 ms after its submission."""
        options = HeteroOptions(large_dim=32, tiny_dim=16, num_tiny=4)
        with driven(self.kind, 2, options) as ran:
            assert ran.workload.legs().keys() == {"beside_large", "tiny_only"}
            ran.workload.context.pieces += [
                Piece("tiny_only", 0, 1, "tiny", submitted_ms=1.0, start_ms=1.005, end_ms=1.015),
                Piece("beside_large", 1, 0, "large", submitted_ms=0.0, start_ms=0.0, end_ms=10.0),
                Piece("beside_large", 1, 1, "tiny", submitted_ms=1.0, start_ms=1.005, end_ms=6.0),
            ]
            found = ran.workload.metrics()
        assert found["tiny_alone_p50_us"] == pytest.approx(10)
        assert found["large_beside_tiny_p50_ms"] == pytest.approx(10)
        assert found["start_delay_alone_p99_us"] == pytest.approx(5)
        assert found["start_delay_beside_large_p99_us"] == pytest.approx(4990)
        assert found["queue_delay_beside_large_p99_us"] == pytest.approx(5)
        assert found["convoy_delay_p99_us"] == pytest.approx(4985)

    def test_delays_that_nobody_timed_are_none(self):
        with driven(self.kind, 2, HeteroOptions(large_dim=32, tiny_dim=16)) as ran:
            assert ran.workload.metrics()["convoy_delay_p50_us"] is None

    def test_every_stream_needs_a_tiny_kernel(self):
        reason = self.kind.refusal(16, HeteroOptions(num_tiny=8), "cpu", 1)
        assert reason == "--num-tiny 8 leaves some of 14 streams without work; ask for --num-tiny 14 or more"

    def test_a_size_is_calibrated_once(self):
        options = HeteroOptions(large_ms=0.05, num_tiny=4)
        dims = set()
        for num_streams in (2, 4):
            with driven(self.kind, num_streams, options) as ran:
                dims.add((ran.workload.large_dim, ran.workload.tiny_dim))
        assert len(dims) == 1

    def test_options_above_zero(self):
        with pytest.raises(ConfigError, match="--tiny-us must be above 0"):
            HeteroOptions(tiny_us=0.0)


def test_graphs_are_refused_on_a_cpu():
    reason = find("graph_subgraphs").refusal(4, SubgraphOptions(graphs=True), "cpu", 1)
    assert reason is not None
    assert reason.startswith("--graphs captures CUDA or HIP graphs")


def test_some_tokens_find_no_room_at_their_expert():
    with driven(find("moe"), 3) as ran:
        ran.iterate(1)
        assert 0 < ran.workload.metrics()["dropped_share"] < 0.5


@pytest.mark.parametrize("num_streams", range(1, 25))
def test_a_pipeline_of_stages_uses_every_stream(num_streams: int):
    used = {stage_stream(stage, item, 3, num_streams) for stage in range(3) for item in range(8)}
    assert used == set(range(num_streams))


def test_a_wrong_product_is_found_and_a_rounded_one_is_not():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator) for _ in range(2))
    c = (a @ b).bfloat16()
    assert check([product_comparison("c", a, b, c)]).ok
    c[40] = c[41].clone()
    assert not check([product_comparison("c", a, b, c)]).ok


def test_what_is_not_finite_is_wrong():
    ones = torch.ones(3)
    outcome = check([TensorComparison("x", torch.tensor([1.0, float("inf"), 1.0]), ones, 0.5)])
    assert not outcome.ok
    assert outcome.detail.startswith("x: ")
