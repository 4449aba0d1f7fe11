import os

import pytest
import torch
import torch.distributed as dist

from tests.dist.launch import RankFailure, run_ranks


def sum_of_ranks(offset: int) -> float:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return value.item()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 does not like this")
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def test_results_come_by_rank():
    assert run_ranks(sum_of_ranks, 2, 10) == [21.0, 21.0]


def test_a_rank_that_raises_shows_its_traceback():
    with pytest.raises(RankFailure, match="rank 1 does not like this"):
        run_ranks(fail_on_rank_1, 2)


def test_a_rank_that_dies_is_noticed():
    with pytest.raises(RankFailure):
        run_ranks(die_on_rank_1, 2)
