"""Distributed workloads with real collectives: two gloo ranks, started once."""

from tests.dist.launch import run_ranks
from tests.queues.workloads import gloo_ranks


def test_two_ranks_compute_what_one_would():
    results = run_ranks(gloo_ranks.everything, 2)
    for rank, (wrong, agrees, lanes_are_kept) in enumerate(results):
        assert wrong == {}
        # An all-gather shows every rank the wrong part; of an all-to-all too, each has a piece.
        assert agrees == [False] * 4, f"rank {rank}"
        assert lanes_are_kept
