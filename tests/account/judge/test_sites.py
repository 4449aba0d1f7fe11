"""Rows of call sites: several ranks that are alike are one row, in the order of what moves."""

import msgspec
import pytest

from aorta.account.judge.sites import site_texts, sites_of
from aorta.records.schema import CallSite, CallSites
from tests.account.reports_in_memory import dataset_of, records_of
from tests.records.run_folders import run_record


def site(line, num_calls, size, moves="a value", op="all_reduce"):
    return CallSite(
        file="/job/train.py", line=line, function="main", op=op, moves=moves, num_calls=num_calls, bytes=size
    )


def rows(*by_rank, program=None):
    return sites_of(run_with(*by_rank, program=program))


def run_with(*by_rank, program=None):
    run = dataset_of("a", records_of(num_ranks=len(by_rank))).first
    run = msgspec.structs.replace(run, sites=lambda rank: by_rank[rank])
    if program is not None:
        record = msgspec.structs.replace(run_record(len(by_rank)), program=program)
        metrics = {name: rows for name, rows in run.metrics.items() if "reduce_scatter" not in name}
        run = msgspec.structs.replace(run, record=record, metrics=metrics)
    return run


def test_a_collective_for_a_module_is_not_said_to_be_of_for():
    (row,) = rows(CallSites(num_steps=1, sites=[site(24, 2, 80 << 20, "for 13")]))
    assert row.text == "all_reduce for 13 in main(), train.py:24: 2 times a step, 80.0 MiB"


@pytest.mark.parametrize(
    ("units", "moves"), [([], "a tensor of 0.up"), ([{"name": "0.up"}], "parameters of 0.up")]
)
def test_a_program_without_units_gathers_no_parameters(units, moves):
    sites = CallSites(num_steps=1, sites=[site(43, 1, 80 << 20, "parameters of 0.up", "all_gather")])
    (row,) = rows(sites, program={"units": units, "modes": {}})
    assert row.moves == moves


def test_numbers_are_of_a_step_and_alike_ranks_are_one_row():
    alike = CallSites(num_steps=4, sites=[site(50, 16, 64 << 20, "gradients, bucket 0: head.weight")])
    own = CallSites(num_steps=4, sites=[*alike.sites, site(60, 1, 4)])
    first, second = rows(alike, own)
    assert (first.ranks, second.ranks) == ([0, 1], [1])
    assert first.text == (
        "all_reduce of gradients, bucket 0: head.weight in main(), train.py:50: 4 times a step, 16.0 MiB"
    )
    assert second.often == "in 25 % of steps"


def test_a_count_that_no_step_has_is_an_average():
    """With a hook of its own, DDP reduces a bucket in the first 10 steps alone."""
    (row,) = rows(CallSites(num_steps=21, sites=[site(101, 31, 21 << 20)]))
    assert row.often == "1.48 times a step on average"


def test_a_rank_that_was_not_looked_at_has_none():
    assert rows(None, CallSites(num_steps=0, sites=[])) == []


def test_a_barrier_moves_nothing():
    (row,) = rows(CallSites(num_steps=2, sites=[site(9, 2, 0, "nothing", "barrier")]))
    assert row.text == "barrier in main(), train.py:9: once a step"


def test_buckets_that_one_line_reduces_as_often_are_one_text():
    """40 MiB in all; the bucket that another line reduces, and a value, have their own."""
    buckets = [
        site(50, 1, mib << 20, f"gradients, bucket {place}: {name}")
        for place, (mib, name) in enumerate([(8, "head"), (25, "embed and 3 more"), (7, "norm")])
    ]
    others = [site(60, 1, 1 << 20, "gradients, bucket 3: late"), site(50, 1, 4)]
    texts = site_texts(run_with(CallSites(num_steps=1, sites=[*others, *buckets])))
    assert texts == [
        "all_reduce of gradients in 3 buckets in main(), train.py:50: once a step each, 40.0 MiB"
        " (most: bucket 1: embed and 3 more, 25.0 MiB)",
        "all_reduce of gradients, bucket 3: late in main(), train.py:60: once a step, 1.0 MiB",
        "all_reduce of a value in main(), train.py:50: once a step, 4 B",
    ]
