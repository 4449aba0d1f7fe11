"""Rows of call sites: several ranks that are alike are one row, in the order of what moves."""

import msgspec

from aorta.account.judge.sites import sites_of
from aorta.records.schema import CallSite, CallSites
from tests.account.reports_in_memory import dataset_of, records_of


def site(line, num_calls, size, moves="a value", op="all_reduce"):
    return CallSite(
        file="/job/train.py", line=line, function="main", op=op, moves=moves, num_calls=num_calls, bytes=size
    )


def rows(*by_rank):
    judged = dataset_of("a", records_of(num_ranks=len(by_rank))).first
    run = msgspec.structs.replace(judged.run, sites=lambda rank: by_rank[rank])
    return sites_of(msgspec.structs.replace(judged, run=run))


def test_numbers_are_of_a_step_and_alike_ranks_are_one_row():
    alike = CallSites(num_steps=4, sites=[site(50, 16, 64 << 20, "gradients, bucket 0: head.weight")])
    own = CallSites(num_steps=4, sites=[*alike.sites, site(60, 1, 4)])
    first, second = rows(alike, own)
    assert (first.ranks, second.ranks) == ([0, 1], [1])
    assert first.text == (
        "all_reduce of gradients, bucket 0: head.weight in main(), train.py:50: 4 times a step, 16.0 MiB"
    )
    assert second.often == "in 25 % of steps"


def test_a_rank_that_was_not_looked_at_has_none():
    assert rows(None, CallSites(num_steps=0, sites=[])) == []


def test_a_barrier_moves_nothing():
    (row,) = rows(CallSites(num_steps=2, sites=[site(9, 2, 0, "nothing", "barrier")]))
    assert row.text == "barrier in main(), train.py:9: once a step"
