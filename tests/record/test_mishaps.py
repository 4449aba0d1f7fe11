"""Scripts that go wrong somewhere and carry on: what is recorded stays true."""

import pytest

import aorta
from aorta.errors import InstrumentError
from tests.dist.launch import run_ranks
from tests.record import mishaps


@pytest.fixture(scope="module")
def happened(tmp_path_factory):
    return run_ranks(mishaps.all_of_them, 2, str(tmp_path_factory.mktemp("mishaps")))


def test_collectives_are_seen_after_a_coalescing_that_the_backend_refuses(happened):
    assert [rank["coalescing_that_fails"] for rank in happened] == [[2, 1]] * 2


def test_a_launch_that_raises_is_no_collective_and_holds_nothing_up(happened):
    for rank in happened:
        numbers, seen, num_before = rank["a_launch_that_raises"]
        assert numbers == [[0], [1], [2], [3]]
        assert seen == {"all_reduce": 4, "broadcast": 0} or seen == {"all_reduce": 4}
        assert num_before == 3


def test_a_send_that_is_waited_for_late_has_no_end_and_holds_nothing_up(happened):
    num_before, num_lines, end_ms, next_comm_ms = happened[0]["a_send_nobody_waits_for"]
    assert (num_before, num_lines, end_ms) == (3, 4, None)
    assert next_comm_ms is not None
    assert next_comm_ms < 1000


def test_groups_of_the_same_ranks_have_names_of_their_own(happened):
    for rank in happened:
        assert rank["groups_alike"] == [("dp", 0), ("dp#2", 0), ("dp", 1), ("dp#2", 1)]


def test_groups_made_anew_are_not_those_that_had_their_names(tmp_path):
    by_rank = run_ranks(mishaps.groups_made_anew, 3, str(tmp_path / "run"))
    assert by_rank[0] == [("first", [0, 1], 0), ("second", [0, 2], 0)]


@pytest.mark.heavy
@pytest.mark.parametrize("wrong", [{"tokens": True}, {"step": "3"}, {"global_step": 1.0}, {"epoch": False}])
def test_numbers_of_a_step_are_ints(tmp_path, wrong):
    with aorta.instrument(tmp_path) as recorder, pytest.raises(InstrumentError, match="must be an int"):
        recorder.step(**wrong)


def test_a_step_is_entered_once(tmp_path):
    with aorta.instrument(tmp_path) as recorder:
        step = recorder.step()
        with step:
            pass
        with pytest.raises(InstrumentError, match="entered before"), step:
            pass
    assert len((tmp_path / "rank_0_metrics.jsonl").read_text().splitlines()) == 1
