"""Ranks that would not meet are told before anything runs."""

import pytest

from aorta.programs.language.emit import Shape, emit
from aorta.programs.language.text import format_program, parse_program
from aorta.programs.lint.one_rank import lint

TWO_LANES = """program("two", ranks=2)
main = current_stream()
X = input(2)
Y = output(2)
{first}
{second}
wait_work(a)
wait_work(b)
"""
A = "a = all_reduce(X[0], out=Y[0], lane=left)"
B = "b = all_reduce(X[1], out=Y[1], lane=right)"


def two(first: str, second: str):
    return parse_program(TWO_LANES.format(first=first, second=second))


@pytest.mark.parametrize("comm", ["ring", "pairwise"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_point_to_point_programs_meet(comm, num_ranks):
    assert lint(emit(Shape(comm=comm, num_tiles=12, num_ranks=num_ranks))).rank_mismatches == []


def test_collectives_in_another_order_on_one_rank_are_told_with_their_place():
    text = format_program(emit(Shape(num_tiles=4)))
    turned = text.replace("all_gather(A[i], out=G[i]", "all_gather(A[(i + rank) % 4], out=G[(i + rank) % 4]")
    found = lint(parse_program(turned)).rank_mismatches
    assert found == ["comm, communication 0: rank 0 issues all_gather[0], rank 1 all_gather[1]"]


def test_one_program_per_rank_must_agree_too():
    right, wrong = emit(Shape(num_tiles=2)), emit(Shape(num_tiles=3))
    assert lint(right, right).rank_mismatches == []
    verdict = lint(right, wrong)
    assert not verdict.is_safe
    assert verdict.rank_mismatches == ["comm, communication 2: rank 0 issues nothing, rank 1 all_gather[2]"]


def test_a_send_that_nobody_receives_is_told():
    text = """program("lost", ranks=2)
main = current_stream()
X = input(2)
Y = output()
sent = send(X[0], lane=p2p, to=(rank + 1) % ranks)
wait_work(sent)
user("fill", reads=[X], writes=[Y])
"""
    found = lint(parse_program(text)).rank_mismatches
    assert found[0] == "p2p: rank 0 sends 1 times to rank 1, which receives 0 times from it"


def test_both_ranks_send_before_they_receive_on_one_lane_and_wait_for_each_other():
    text = """program("head to head", ranks=2)
main = current_stream()
X = input()
Y = output()
sent = send(X, lane=p2p, to=(rank + 1) % ranks)
got = recv(out=Y, lane=p2p, by=(rank + 1) % ranks)
wait_work(sent)
wait_work(got)
"""
    assert "wait for each other" in lint(parse_program(text)).rank_mismatches[0]
    posted_together = text.replace("sent = send(X, lane=p2p, to=(rank + 1) % ranks)\n", "").replace(
        "got = recv(out=Y, lane=p2p, by=(rank + 1) % ranks)\nwait_work(sent)\n",
        "got = send_recv(X, out=Y, lane=p2p, to=(rank + 1) % ranks, by=(rank + 1) % ranks)\n",
    )
    assert lint(parse_program(posted_together)).rank_mismatches == []


def test_two_groups_in_opposite_order_are_safe_until_one_waits_for_the_other():
    assert lint(two(A, B), two(B, A)).rank_mismatches == []
    waits = [two(f"{A}\nwait_work(a)", B), two(f"{B}\nwait_work(b)", A)]
    assert "wait for each other" in lint(*waits).rank_mismatches[0]
