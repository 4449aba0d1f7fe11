"""Programs on threads and gloo give what the same arithmetic gives without any overlap."""

import pytest

from tests.dist.launch import run_ranks
from tests.programs import rank_programs


@pytest.fixture(scope="module", params=(2, 3), ids=lambda ranks: f"{ranks} ranks")
def outcome(request: pytest.FixtureRequest) -> list[dict[str, bool]]:
    return run_ranks(rank_programs.run_every_program, request.param)


def test_every_emitted_program_gives_the_references_bits(outcome):
    special = ("fork", "staging", "refused")
    for of_rank in outcome:
        wrong = [label for label, right in of_rank.items() if not right and not label.startswith(special)]
        assert not wrong
        assert len(of_rank) > 80


def test_a_missing_fork_gives_wrong_results(outcome):
    for of_rank in outcome:
        assert of_rank["fork hoisted"]
        assert not of_rank["fork none"]


def test_fewer_staging_buffers_than_streams_give_wrong_results(outcome):
    for of_rank in outcome:
        assert of_rank["staging 3"]
        assert not of_rank["staging 1"]


@pytest.mark.parametrize("difference", ["order", "count", "messages"])
def test_ranks_that_would_not_meet_are_refused_on_every_rank(outcome, difference):
    assert all(of_rank[f"refused {difference}"] for of_rank in outcome)
