"""What emit gives: the loops of the named orders, and no combination without a meaning."""

import pytest

from aorta.programs.language.emit import Shape, emit
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.ir import Communicate, Gemm
from aorta.programs.language.text import format_program
from tests.programs.named import emit_named

FACTORIZED = """program("ag_gemm", ranks=2, order="factorized", tile_order="depth", tiles=8, streams=4)
main = current_stream()
A = input(8)
W = input()
G = allocate(8)
C = output(8)
for i in range(8):
    set_stream(worker[i % 4])
    forked[i] = record(main)
    wait(forked[i])
    gathered[i] = all_gather(A[i], out=G[i], lane=comm)
    wait_work(gathered[i])
    gemm(G[i], W, out=C[i])
    set_stream(main)
    joined[i] = record(worker[i % 4])
    wait(joined[i])
"""

DEVELOPED_BODY = """for i in range(4):
    set_stream(worker[i % 4])
    forked[i] = record(main)
    wait(forked[i])
for i in range(8):
    set_stream(worker[i % 4])
    gathered[i] = all_gather(A[i], out=G[i], lane=comm)
    wait_work(gathered[i])
    gemm(G[i], W, out=C[i])
    set_stream(main)
    joined[i] = record(worker[i % 4])
    wait(joined[i])
"""


def test_factorized_has_fork_and_join_in_the_loop_over_tiles():
    assert format_program(emit_named("factorized")) == FACTORIZED


def test_developed_has_all_forks_in_a_loop_of_their_own():
    assert format_program(emit_named("developed")).endswith("C = output(8)\n" + DEVELOPED_BODY)


@pytest.mark.parametrize("comm", ["ring", "pairwise"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_rank_computes_every_slice_once_and_receives_all_but_its_own(comm, num_ranks):
    program = emit(Shape(comm=comm, num_tiles=2 * num_ranks, num_ranks=num_ranks))
    for rank in range(num_ranks):
        ops = [step.op for step in program.unroll(rank)]
        computed = [op.out.index for op in ops if isinstance(op, Gemm)]
        received = [op.out.index for op in ops if isinstance(op, Communicate) and op.out is not None]
        everything = [(i, d) for i in range(2) for d in range(num_ranks)]
        assert sorted(computed) == everything
        assert sorted(received) == [part for part in everything if part[1] != rank]
        for op in ops:
            # A gemm takes the slice that it is named after: its own shard, or the one received.
            if isinstance(op, Gemm) and op.out.index[1] != rank:
                assert (op.a.name, op.a.index) == ("G", op.out.index)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_what_a_ring_passes_on_is_what_its_neighbour_expects(num_ranks):
    program = emit(Shape(comm="ring", num_tiles=num_ranks, num_ranks=num_ranks))
    sent, received = {}, {}
    for rank in range(num_ranks):
        comms = [step.op for step in program.unroll(rank) if isinstance(step.op, Communicate)]
        for number, op in enumerate(comms):
            owner = rank if op.source.name == "A" else op.source.index[1]
            sent[rank, op.to, number] = owner
            received[op.by, rank, number] = op.out.index[1]
    assert sent == received


def test_tiles_take_turns_over_streams_and_lanes():
    comms = [s for s in emit(Shape(num_streams=3, num_lanes=2)).unroll() if isinstance(s.op, Communicate)]
    assert [step.stream for step in comms] == [f"worker[{i % 3}]" for i in range(8)]
    assert [str(step.op.lane) for step in comms] == [f"comm[{i % 2}]" for i in range(8)]


def test_synchronous_collectives_have_no_work_and_need_no_wait():
    text = format_program(emit(Shape(asynchronous=False)))
    assert "    all_gather(A[i], out=G[i], lane=comm)\n    gemm(" in text
    assert "wait_work" not in text


def test_breadth_issues_all_communication_first():
    program = emit(Shape(tile_order="breadth", num_tiles=4))
    ops = [step.op for step in program.unroll(1) if isinstance(step.op, Communicate | Gemm)]
    assert [op.out.index[0] for op in ops] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [isinstance(op, Gemm) for op in ops] == [False] * 4 + [True] * 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"num_tiles": 0}, "tiles must be at least 1, got 0"),
        ({"num_streams": 0}, "streams must be at least 1"),
        ({"op": "gemm_rs", "num_staging": 0}, "staging buffers must be at least 1"),
        ({"num_staging": 2}, "ag_gemm has no staging buffers"),
        ({"join": "none"}, "join is in_loop or hoisted"),
        ({"comm": "ring", "op": "gemm_rs"}, "is there for ag_gemm"),
        ({"comm": "ring", "num_tiles": 8, "num_ranks": 3}, "multiple of ranks, got 8 tiles on 3 ranks"),
        ({"comm": "pairwise", "tile_order": "breadth"}, "depth order"),
        ({"comm": "ring", "asynchronous": False}, "asynchronous"),
        ({"tile_order": "breadth", "asynchronous": False}, "needs asynchronous communication"),
    ],
)
def test_what_has_no_meaning_is_refused(given, expected):
    with pytest.raises(HostProgramError, match=expected):
        emit(Shape(**given))


def test_an_unknown_order_names_the_known_ones():
    with pytest.raises(HostProgramError, match="known: factorized, developed, join_hoisted, both_hoisted"):
        emit_named("factorised")
