"""How many GPUs a node has, beside what the hardware file says of its own node."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.hardware.names import hardware_names
from aorta.hardware.part import load_hardware
from aorta.projection.collectives import OPS, RankGroup, collective_time, rank_group
from aorta.projection.model import load_model
from aorta.projection.plan import Plan
from aorta.projection.prices import Pricer
from aorta.projection.step import project


def step_s(hardware, nodes, gpus_per_node, model="llama3-8b", **plan):
    gpus = nodes * gpus_per_node
    plan = {"dp": gpus, "global_batch_size": gpus, "sharding": "fsdp2"} | plan
    plan = Plan(nodes=nodes, gpus_per_node=gpus_per_node, **plan)
    return project(load_model(model), plan, Pricer(hardware, plan)).step_s


@pytest.mark.parametrize(
    ("num_ranks", "gpus_per_node", "gpu", "inside"),
    [
        pytest.param(8, 1, "h100", 1, id="one-gpu-nodes"),
        pytest.param(8, 4, "h100", 4, id="half-a-node"),
        pytest.param(16, 16, "h100", 8, id="links-join-no-more-than-before"),
        pytest.param(16, 6, "h100", 4, id="uneven"),
        pytest.param(64, 4, "gb200", 64, id="nvl72-in-trays-of-4"),
        pytest.param(64, 1, "gb200", 64, id="nvl72-in-trays-of-1"),
    ],
)
def test_a_node_bounds_the_domain_unless_links_reach_beyond_it(num_ranks, gpus_per_node, gpu, inside):
    group = rank_group(num_ranks, load_hardware(gpu), gpus_per_node=gpus_per_node)
    assert group == RankGroup(num_ranks, inside)


def test_nodes_of_one_gpu_are_what_a_file_of_such_nodes_says():
    eight = load_hardware("h100")
    one = msgspec.structs.replace(
        eight,
        scale_up=msgspec.structs.replace(eight.scale_up, domain_size=1),
        scale_out=msgspec.structs.replace(eight.scale_out, gpus_per_node=1, nics_per_node=1),
    )
    assert step_s(eight, 8, 1) == pytest.approx(step_s(one, 8, 1))
    assert step_s(eight, 8, 1) > 2 * step_s(eight, 1, 8)


@pytest.mark.heavy
@pytest.mark.parametrize("gpu", ["h100", "mi300x", "gb200"])
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({}, id="fsdp2"),
        pytest.param({"sharding": "zero1", "dp": 16, "tp": 4, "stack": "megatron"}, id="tp4"),
        pytest.param({"model": "mixtral-8x7b", "sharding": "zero1", "ep": 8}, id="ep"),
        pytest.param({"model": "mixtral-8x7b", "sharding": "zero1", "ep": 8, "deepep": True}, id="deepep"),
    ],
)
def test_more_gpus_per_node_never_make_a_step_slower(gpu, plan):
    sizes = [size for size in (1, 2, 4, 8, 16, 64) if size >= plan.get("tp", 1)]
    times = [step_s(load_hardware(gpu), 64 // size, size, **plan) for size in sizes]
    assert all(more <= fewer * (1 + 1e-9) for fewer, more in zip(times, times[1:], strict=False)), times


@pytest.mark.heavy
def test_what_deepep_sends_depends_on_the_domain():
    """It hands a copy on inside a domain: trays of an NVL72 and nodes larger than the links are neither."""
    plan = {"model": "deepseek-v3", "sharding": "zero1", "ep": 64, "deepep": True}
    trays, rack = (step_s(load_hardware("gb200"), 64 // size, size, **plan) for size in (4, 64))
    assert trays == pytest.approx(rack)
    eight, double = (step_s(load_hardware("h100"), 64 // size, size, **plan) for size in (8, 16))
    assert eight == pytest.approx(double)


@pytest.mark.heavy
@given(
    st.sampled_from(hardware_names()),
    st.sampled_from(OPS),
    st.floats(2**21, 2**30),
    st.sampled_from([8, 12, 16, 64, 512]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([(1, 2), (1, 8), (2, 4), (4, 8), (2, 8), (8, 16)]),
)
def test_more_gpus_per_node_never_make_large_collectives_slower(gpu, op, bytes_a_rank, ranks, stride, sizes):
    """Not so two GPUs of a mesh, whose one link is no faster than a network card, nor latencies: of an
    all-to-all every pair of ranks has them."""
    hardware, size = load_hardware(gpu), bytes_a_rank * ranks
    small, large = (
        collective_time(op, size, rank_group(ranks, hardware, stride, each), hardware).time_s
        for each in sizes
    )
    assert large <= small * (1 + 1e-9)
