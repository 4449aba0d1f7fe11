"""The exchange of tokens beside another micro-batch."""

import pytest

from aorta.errors import ConfigError
from aorta.hardware.part import load_hardware
from aorta.projection.model import load_model
from aorta.projection.pipeline import Chunk, duration_s
from aorta.projection.plan import Plan
from aorta.projection.prices import Pricer
from aorta.projection.step import project
from aorta.projection.streams import Contention, StreamTask, run

MIXTURE = {"nodes": 4, "dp": 4, "tp": 2, "pp": 4, "ep": 8, "global_batch_size": 64, "seq_len": 4096}


def step_s(**plan):
    plan = Plan(**(MIXTURE | plan))
    return project(load_model("mixtral-8x22b"), plan, Pricer(load_hardware("h100"), plan)).step_s


def test_exchange_beside_another_micro_batch_is_faster_but_not_free():
    there, without = step_s(ep_overlap=True), step_s()
    plan = Plan(**MIXTURE)
    pricer = Pricer(load_hardware("h100"), plan, disabled_terms=frozenset({"ep_comm"}))
    free = project(load_model("mixtral-8x22b"), plan, pricer).step_s
    assert free < there < without


def test_pairs_save_in_the_middle_of_the_schedule_alone():
    # Two ranks, four micro-batches. The last rank pairs each backward pass with the forward pass before it.
    stage = Chunk(1.0, 2.0, 0.0, 0.5)
    assert duration_s([[stage]], 4) == pytest.approx(4 * 2.5)
    assert duration_s([[Chunk(1.0, 2.0)]], 4) == pytest.approx(4 * 3.0)


@pytest.mark.parametrize(
    ("link_share", "expected_s"),
    [
        pytest.param(1.0, 2.0, id="links-are-slowed"),
        pytest.param(0.75, 1.5, id="partly"),
        pytest.param(0.2, 1.0, id="the-network-is-not"),
    ],
)
def test_a_collective_that_waits_for_the_network_is_not_slowed_by_compute(link_share, expected_s):
    tasks = [
        StreamTask("compute", "gemm", "gemm", 10.0),
        StreamTask("all_to_all", "dispatch", "ep_comm", 1.0, link_share=link_share),
    ]
    assert run(tasks, Contention(1.0, 2.0)).end_s[1] == pytest.approx(expected_s)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"pp": 1, "dp": 16}, id="no-pipeline"),
        pytest.param({"ep": 1}, id="no-exchange"),
        pytest.param({"recompute": "full"}, id="recomputes-the-exchange"),
    ],
)
def test_overlap_of_nothing_is_refused(plan):
    with pytest.raises(ConfigError, match="ep-overlap"):
        step_s(ep_overlap=True, **plan)


def test_a_layer_for_further_tokens_costs_more_than_one_of_the_others():
    plan = {"nodes": 8, "dp": 8, "pp": 8, "ep": 8, "global_batch_size": 64, "dtype": "fp8"}
    model, gpu = load_model("deepseek-v3"), load_hardware("h100")
    alone, also = (
        project(model, Plan(**plan, mtp=mtp), Pricer(gpu, Plan(**plan))).step_s for mtp in (False, True)
    )
    assert also > alone * (1 + 1 / model.num_layers)


def test_recomputed_modules_cost_time_in_order_of_their_work():
    model, gpu = load_model("deepseek-v3"), load_hardware("h100")
    plan = {"nodes": 8, "dp": 8, "pp": 8, "ep": 8, "global_batch_size": 64, "dtype": "fp8"}

    def seconds(*modules):
        made = Plan(**plan, recompute_modules=modules)
        return project(model, made, Pricer(gpu, made)).step_s

    assert seconds() < seconds("norm") < seconds("norm", "latent_up")
