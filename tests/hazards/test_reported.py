"""Twelve races that users of other projects reported, each reduced to the order of its operations.

The reports were read for which stream waits for which; the logs are ours.
"""

import pytest

from aorta.hazards.check import HazardCheck, play
from tests.hazards.planted import FILL, NCCL, PINNED, REDUCE, A, B, edge, freed, new, op, waits

COMPUTE, SIDE, D2H, H2D = "compute", "side", "d2h", "h2d"
REPORTED = {
    "pytorch#180665: a reduced gradient is freed while another stream copies it to the host": (
        [new(A, REDUCE), op(REDUCE, "reduce_scatter", writes=[A]), waits(NCCL, REDUCE),
         op(NCCL, "offload", [A], [PINNED]), freed(A), new(A, REDUCE), op(REDUCE, "next", writes=[A])],
        ("reuse", (REDUCE, NCCL)),
    ),
    "pytorch#180889: the next layer gets the buffer that is all-reduced": (
        [new(A, REDUCE), op(REDUCE, "reduce_scatter", writes=[A]), waits(NCCL, REDUCE),
         op(NCCL, "all_reduce", [A], [A]), op(NCCL, "cast", [A], [B]), freed(A), new(A, REDUCE)],
        ("reuse", (REDUCE, NCCL)),
    ),
    "DeepSpeed#8061: the reduction waits for one of two streams that fill its bucket": (
        [op("hook 1", "copy", writes=[(0, 8)]), op("hook 2", "copy", writes=[(8, 8)]),
         waits(REDUCE, "hook 1"), op(REDUCE, "all_reduce", [(0, 16)], [(0, 16)])],
        ("race", (REDUCE, "hook 2")),
    ),
    "DeepSpeed#5606: the bucket is filled again while it is reduced": (
        [*FILL, waits(REDUCE, COMPUTE), op(REDUCE, "all_reduce", [A], [A]), op(COMPUTE, "fill", writes=[A])],
        ("race", (COMPUTE, REDUCE)),
    ),
    "DeepSpeed#7965: a reduced copy is freed while the reduction's stream uses it": (
        [*FILL, waits(REDUCE, COMPUTE), op(REDUCE, "all_reduce", [A], [A]), freed(A), new(A)],
        ("reuse", (COMPUTE, REDUCE)),
    ),
    "DeepSpeed#7805: the index of two buffers is reset, and the first is filled twice": (
        [*FILL, waits(REDUCE, COMPUTE), op(REDUCE, "reduce first", [A], [A]),
         op(COMPUTE, "second", writes=[B]), op(COMPUTE, "first again", writes=[A])],
        ("race", (COMPUTE, REDUCE)),
    ),
    "DeepSpeed#7898: the reduction waits for the default stream, gradients come from another": (
        [op(SIDE, "backward", writes=[A]), waits(REDUCE, COMPUTE), op(REDUCE, "copy", [A], [B])],
        ("race", (REDUCE, SIDE)),
    ),
    "trl#7195: the compute stream was taken once, at construction": (
        [op(SIDE, "activation", writes=[A]), waits(D2H, COMPUTE), op(D2H, "offload", [A], [PINNED])],
        ("race", (D2H, SIDE)),
    ),
    "trl#7195: the clone of a view is queued behind the snapshot": (
        [*FILL, waits(D2H, COMPUTE), op(COMPUTE, "clone", [A], [B]), op(D2H, "offload", [B], [PINNED])],
        ("race", (D2H, COMPUTE)),
    ),
    "torchtitan#2581: the stream waits for itself, and the pool is overwritten while it is read": (
        [op(H2D, "prefetch", [PINNED], [A]), waits(D2H, D2H), op(D2H, "offload", [B], [PINNED])],
        ("race", (D2H, H2D)),
    ),
    "torchrec#4191: the stream that distributes data uses the cache beside the one that prefetches": (
        [op("prefetch", "cache lookup", [B], [A]), op("data_dist", "input dist", [B], [A])],
        ("race", ("data_dist", "prefetch")),
    ),
    "Megatron-LM#7398: a reload does not wait for the copy that fills its buffer": (
        [op(D2H, "offload", [A], [PINNED]), op(COMPUTE, "reload", [PINNED], [B])],
        ("race", (COMPUTE, D2H)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("report", REPORTED)
def test_a_reported_race_is_found_with_the_order_that_it_lacked(report):
    log, expected = REPORTED[report]
    assert [(hazard.kind, edge(hazard)) for hazard in play(log, HazardCheck()).hazards.values()] == [expected]
