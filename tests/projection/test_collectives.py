import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.errors import ProjectionError
from aorta.hardware.names import hardware_names
from aorta.hardware.part import load_hardware
from aorta.projection.collectives import ALGORITHMS, OPS, RankGroup, busbw_limit, collective_time, rank_group
from aorta.timeline.collective import busbw_factor

GPUS = st.sampled_from(hardware_names())
SIZES = st.floats(1, 2**36)
OP_AND_ALGORITHM = st.sampled_from([(op, name) for op in OPS for name in ("auto", *ALGORITHMS[op])])
GROUPS = st.tuples(st.sampled_from([2, 4, 8, 16, 64, 512, 4096]), st.sampled_from([1, 2, 4, 8, 64]))
ROUNDING = 1 + 1e-9
GIB = 2**30


@pytest.mark.heavy
@given(GPUS, OP_AND_ALGORITHM, SIZES, GROUPS)
def test_bus_bandwidth_stays_below_the_links(gpu, op_and_algorithm, size, ranks_and_stride):
    op, algorithm = op_and_algorithm
    hardware = load_hardware(gpu)
    group = rank_group(ranks_and_stride[0], hardware, ranks_and_stride[1])
    time_s = collective_time(op, size, group, hardware, algorithm).time_s
    busbw = busbw_factor(op, group.num_ranks) * size / time_s
    out = hardware.scale_out
    if group.num_domains == 1:
        assert busbw <= hardware.scale_up.gpu_bytes_per_s
    elif op != "all_to_all" and algorithm != "hierarchical":
        node = out.nic_bytes_per_s * out.nics_per_node / out.gpus_per_node * group.ranks_per_domain
        assert busbw <= node
    assert busbw <= busbw_limit(op, group, hardware, algorithm)


@pytest.mark.heavy
@given(GPUS, OP_AND_ALGORITHM, SIZES, st.floats(1, 100), GROUPS)
def test_more_bytes_are_never_faster(gpu, op_and_algorithm, size, factor, ranks_and_stride):
    hardware = load_hardware(gpu)
    group = rank_group(ranks_and_stride[0], hardware, ranks_and_stride[1])
    op, algorithm = op_and_algorithm
    assert collective_time(op, size, group, hardware, algorithm).time_s <= (
        collective_time(op, size * factor, group, hardware, algorithm).time_s * ROUNDING
    )


@pytest.mark.heavy
@given(GPUS, OP_AND_ALGORITHM, SIZES, GROUPS, st.floats(1, 10), st.floats(1, 10))
def test_more_bandwidth_is_never_slower(gpu, op_and_algorithm, size, ranks_and_stride, links, nics):
    hardware = load_hardware(gpu)
    up, out = hardware.scale_up, hardware.scale_out
    faster = msgspec.structs.replace(
        hardware,
        scale_up=msgspec.structs.replace(
            up,
            gpu_bytes_per_s=up.gpu_bytes_per_s * links,
            sustained_gpu_bytes_per_s=up.sustained_gpu_bytes_per_s * links,
        ),
        scale_out=msgspec.structs.replace(
            out,
            nic_bytes_per_s=out.nic_bytes_per_s * nics,
            sustained_nic_bytes_per_s=out.sustained_nic_bytes_per_s * nics,
        ),
    )
    group = rank_group(ranks_and_stride[0], hardware, ranks_and_stride[1])
    op, algorithm = op_and_algorithm
    assert collective_time(op, size, group, faster, algorithm).time_s <= (
        collective_time(op, size, group, hardware, algorithm).time_s * ROUNDING
    )


@given(GPUS, st.sampled_from(OPS[:4]), SIZES)
def test_the_network_is_never_faster_than_the_node(gpu, op, size):
    """The same ranks, apart: one in each domain instead of all in one."""
    hardware = load_hardware(gpu)
    ranks = min(8, int(hardware.scale_up.domain_size))
    together = collective_time(op, size, RankGroup(ranks, ranks), hardware).time_s
    assert together <= collective_time(op, size, RankGroup(ranks, 1), hardware).time_s


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    """Large messages: same bytes over the wire; in place, so a chunk less is copied."""
    hardware, group = load_hardware("h200"), RankGroup(8, 8)
    times = {
        op: collective_time(op, 4 * GIB, group, hardware).time_s
        for op in ("all_reduce", "all_gather", "reduce_scatter")
    }
    assert times["all_reduce"] == pytest.approx(times["all_gather"] + times["reduce_scatter"], rel=0.06)


def test_pxn_pipelines_what_hierarchical_does_in_turn():
    hardware, group = load_hardware("h100"), RankGroup(64, 8)
    pxn, turns, direct = (
        collective_time("all_to_all", 64 * 2**20, group, hardware, name).time_s
        for name in ("pxn", "hierarchical", "direct")
    )
    assert pxn < turns
    assert pxn < direct  # 7 messages over the network instead of 56


def test_a_message_to_one_peer_uses_one_xgmi_link():
    """MI300X: 64 GB/s to each of 7 peers; NVLink gives a pair the whole rate."""
    mesh = collective_time("p2p", GIB, RankGroup(2, 2), load_hardware("mi300x"))
    switch = collective_time("p2p", GIB, RankGroup(2, 2), load_hardware("h100"))
    assert mesh.time_s == pytest.approx(GIB / 48e9, rel=0.2)
    assert switch.time_s == pytest.approx(GIB / 396e9, rel=0.1)


def test_a_small_group_of_a_mesh_has_few_links():
    mesh = load_hardware("mi300x")
    assert busbw_limit("all_reduce", RankGroup(2, 2), mesh) == pytest.approx(64e9)
    assert busbw_limit("all_reduce", RankGroup(8, 8), mesh) == pytest.approx(448e9)


@pytest.mark.parametrize(
    ("op", "size", "ranks", "low_gb_s", "high_gb_s"),
    [
        # Primus node smoke and preflight, MI300X
        pytest.param("all_reduce", 64 * 2**20, 8, 199, 230, id="all-reduce-64MiB-8"),
        # ROCm cvs rccl_config.json, two nodes; thresholds, so 5 % of room
        pytest.param("all_reduce", 8 * GIB, 16, 330 * 0.95, 350, id="all-reduce-8GiB-16"),
        pytest.param("all_to_all", 8 * GIB, 16, 45 * 0.95, 50, id="all-to-all-8GiB-16"),
    ],
)
def test_published_bus_bandwidths_of_mi300x(op, size, ranks, low_gb_s, high_gb_s):
    hardware = load_hardware("mi300x")
    done = collective_time(op, size, rank_group(ranks, hardware), hardware)
    assert low_gb_s <= done.details["busbw_bytes_per_s"] / 1e9 <= high_gb_s


def test_one_rank_costs_nothing():
    assert collective_time("all_reduce", 1e9, RankGroup(1, 1), load_hardware("h200")).time_s == 0


@pytest.mark.parametrize(
    ("num_ranks", "stride", "gpu", "inside"),
    [
        pytest.param(8, 1, "h100", 8, id="one-node"),
        pytest.param(16, 1, "h100", 8, id="two-nodes"),
        pytest.param(64, 8, "h100", 1, id="dp-beside-tp8"),
        pytest.param(16, 4, "h100", 2, id="dp-beside-tp4"),
        pytest.param(64, 1, "gb200", 64, id="nvl72"),
        pytest.param(12, 1, "h100", 6, id="uneven"),
    ],
)
def test_where_ranks_sit(num_ranks, stride, gpu, inside):
    assert rank_group(num_ranks, load_hardware(gpu), stride) == RankGroup(num_ranks, inside)


@pytest.mark.parametrize(
    ("op", "size", "group", "algorithm", "message"),
    [
        pytest.param("allreduce", 1, (2, 2), "auto", "did you mean 'all_reduce'", id="op"),
        pytest.param("all_reduce", 1, (2, 2), "pxn", "no algorithm 'pxn'", id="algorithm"),
        pytest.param("all_reduce", -1, (2, 2), "auto", "at least 0", id="bytes"),
        pytest.param("all_reduce", 1, (16, 16), "auto", "links 8 GPUs", id="domain"),
        pytest.param("all_reduce", 1, (12, 8), "auto", "evenly", id="uneven"),
    ],
)
def test_what_cannot_be_priced_is_refused(op, size, group, algorithm, message):
    with pytest.raises(ProjectionError, match=message):
        collective_time(op, size, RankGroup(*group), load_hardware("h200"), algorithm)


def test_low_latency_steps_are_shorter_and_bytes_take_longer():
    hardware = load_hardware("h200")
    group = rank_group(8, hardware)
    small, large = 2**16, 2**30

    def time_s(size, algorithm):
        return collective_time("all_reduce", size, group, hardware, algorithm).time_s

    assert time_s(small, "low_latency_tree") < time_s(small, "tree")
    assert time_s(large, "low_latency_ring") > time_s(large, "ring")
    assert time_s(small, "auto") == min(time_s(small, name) for name in ("low_latency_tree", "tree", "ring"))


def test_gathers_run_on_a_ring():
    """The library has no tree for them inside a node: latency grows with the ranks, not their logarithm."""
    hardware = load_hardware("h200")
    two, eight = (
        collective_time("all_gather", 1024, rank_group(n, hardware), hardware).time_s for n in (2, 8)
    )
    hop_s = hardware.efficiency.collective.low_latency_hop_s
    assert eight - two == pytest.approx(6 * hop_s, rel=0.2)
