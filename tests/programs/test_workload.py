"""The workload of the queue evaluation that runs these programs."""

import itertools

import pytest
import torch
import torch.distributed as dist

from aorta.errors import ConfigError
from aorta.queues.workloads.pipelined_gemm import PipelinedGemm, PipelinedGemmOptions
from tests.dist.launch import run_ranks
from tests.queues.workloads.driver import driven

ORDERS = ("factorized", "developed", "join_hoisted", "both_hoisted")
OPS = ("ag_gemm", "gemm_rs", "gemm_ar")


def checked() -> dict[str, str]:
    """What is wrong with each order and operation on these ranks, iterations unjoined; legs must run too."""
    wrong = {}
    torch.set_num_threads(1)
    for number, (op, order) in enumerate(itertools.product(OPS, ORDERS)):
        streams = (3, 6)[number % 2]
        options = PipelinedGemmOptions(op=op, emission_order=order, tiles=4)  # type: ignore[arg-type]
        with driven(PipelinedGemm, streams, options, dist.group.WORLD) as ran:
            ran.iterate(3, join=False)
            check = ran.workload.validate_correctness()
            if not check.ok:
                wrong[f"{op} {order} {streams}"] = check.detail
            for leg, work in ran.workload.legs().items():
                ran.iterate(1, work=work)
                if leg == "serial" and not ran.workload.validate_correctness().ok:
                    wrong[f"{op} {order} {streams} serial"] = "differs"
    return wrong


def test_orders_and_operations_agree_with_the_reference_on_two_ranks():
    assert run_ranks(checked, 2) == [{}, {}]


@pytest.mark.parametrize(("order", "false_edges"), [("factorized", 3), *((o, 0) for o in ORDERS[1:])])
def test_it_says_how_many_waits_its_order_adds(order, false_edges):
    options = PipelinedGemmOptions(emission_order=order, tiles=4)
    with driven(PipelinedGemm, 6, options) as ran:
        ran.iterate(1)
        assert ran.workload.metrics() == {"false_edges": false_edges}


def test_more_workers_than_tiles_are_refused():
    options = PipelinedGemmOptions(tiles=4)
    refusal = PipelinedGemm.refusal(7, options, "cpu", 1)
    assert refusal == "5 workers and only 4 tiles; ask for --streams 6 or fewer, or --tiles 5 or more"
    assert PipelinedGemm.refusal(6, options, "cpu", 1) is None
    with pytest.raises(ConfigError, match="--tiles must be at least 1"):
        PipelinedGemmOptions(tiles=0)
