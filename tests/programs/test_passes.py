"""Rewriting keeps what the data needs, removes what it does not, and refuses what would break it."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aorta.programs.language.emit import Shape, emit
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.graph import graph_of
from aorta.programs.language.ir import DATA_OPS
from aorta.programs.language.text import format_op, parse_program
from aorta.programs.lint.one_rank import lint, required_pairs
from aorta.programs.passes import hoist_fork, hoist_join, prefetch
from tests.programs.named import emit_named
from tests.programs.random_programs import MAIN_FILLS, shapes
from tests.programs.streams import Streams

PASSES = {
    "fork": hoist_fork,
    "join": hoist_join,
    "both": lambda program: hoist_join(hoist_fork(program)),
}


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
@pytest.mark.parametrize(("num_tiles", "num_streams"), [(8, 4), (8, 1), (3, 5), (1, 1), (7, 3)])
@pytest.mark.parametrize(
    ("name", "order"), [("fork", "developed"), ("join", "join_hoisted"), ("both", "both_hoisted")]
)
def test_a_hoisted_factorized_loop_is_the_program_that_emit_gives(op, num_tiles, num_streams, name, order):
    given = {"op": op, "num_tiles": num_tiles, "num_streams": num_streams}
    assert PASSES[name](emit_named("factorized", **given)).body == emit_named(order, **given).body


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_prefetch_of_all_tiles_is_breadth(op):
    given = {"num_staging": 5} if op == "gemm_rs" else {}
    depth = emit(Shape(op=op, num_tiles=5, **given))
    breadth = emit(Shape(op=op, num_tiles=5, tile_order="breadth"))
    assert issued(prefetch(depth, 5)) == issued(breadth)
    assert issued(prefetch(depth, 99)) == issued(breadth)


def test_prefetch_issues_the_next_all_gather_before_it_waits_for_this_one():
    texts = [text for text, _ in issued(prefetch(emit(Shape(num_tiles=3)), 1))]
    rows = [text.partition("(")[0] + text.partition("out=")[2][:4] for text in texts]
    assert rows == [
        "gathered[0] = all_gatherG[0]",
        "gathered[1] = all_gatherG[1]",
        "gemmC[0]",
        "gathered[2] = all_gatherG[2]",
        "gemmC[1]",
        "gemmC[2]",
    ]


def issued(program, rank=0):
    return [(format_op(s.op), s.stream) for s in program.unroll(rank) if isinstance(s.op, DATA_OPS)]


def rewritten(program, name, distance):
    try:
        return (prefetch(program, distance) if name == "prefetch" else PASSES[name](program)), ""
    except HostProgramError as error:
        return None, str(error)


@pytest.mark.heavy
@given(shapes(), st.sampled_from([*PASSES, "prefetch"]), st.integers(1, 4))
def test_a_pass_keeps_operations_streams_and_dependencies(shape, name, distance):
    program = emit(shape)
    changed, refusal = rewritten(program, name, distance)
    if changed is None:
        assume("no loop" not in refusal)
        # The only reason to refuse: staging that the tiles ahead would overwrite.
        assert (name, shape.op) == ("prefetch", "gemm_rs")
        assert "would no longer wait" in refusal
        return
    verdict = lint(changed)
    assert (verdict.missing_edges, verdict.rank_mismatches) == ([], [])
    for rank in range(shape.num_ranks):
        assert sorted(issued(changed, rank)) == sorted(issued(program, rank))
        graph, machine = graph_of(program, rank), Streams.of(changed, rank)
        labels = [op if isinstance(op, str) else format_op(op) for op in machine.operations]
        for u, v, _ in list(required_pairs(graph))[:60]:
            if u > 0 and v < len(graph.nodes) - 1:
                a, b = (labels.index(graph.nodes[at].label) for at in (u, v))
                assert not machine.can_run_before(late=a, early=b)


@pytest.mark.heavy
@given(shapes())
def test_either_hoist_leaves_no_false_edge_of_a_collective_loop(shape):
    assume(shape.comm == "collective")
    program = emit(replace(shape, fork="in_loop", join="in_loop"))
    for change in PASSES.values():
        assert lint(change(program)).false_edges == []


def test_a_fork_that_orders_data_of_the_loop_stays_in_it():
    with pytest.raises(
        HostProgramError, match=r"cannot hoist the fork: gemm\(B\[0\].* no longer wait for user"
    ):
        hoist_fork(parse_program(MAIN_FILLS))


USED_BY_MAIN = """    gemm(B[i], W, out=C[i])
    set_stream(main)
    back[i] = record(worker[i % 2])
    wait(back[i])
    user("use", reads=[C[i]], writes=[A[i]])
"""


def test_a_join_that_orders_data_of_the_loop_stays_in_it():
    text = MAIN_FILLS.replace("    gemm(B[i], W, out=C[i])\n", USED_BY_MAIN)
    assert lint(parse_program(text)).is_safe
    with pytest.raises(HostProgramError, match="cannot hoist the join: "):
        hoist_join(parse_program(text))


def test_work_of_main_before_the_loop_stays_before_the_forks():
    text = MAIN_FILLS.replace(
        '    set_stream(main)\n    user("fill", reads=[A[i]], writes=[B[i]])\n', ""
    ).replace("for i in range(4):\n", 'user("fill", reads=[A], writes=[B])\nfor i in range(4):\n', 1)
    changed = hoist_fork(parse_program(text))
    assert lint(changed).is_safe
    assert [text for text, _ in issued(changed)][0].startswith('user("fill"')


def test_work_that_would_move_to_another_stream_stops_a_pass():
    text = MAIN_FILLS.replace("    set_stream(main)\n    user(", "    user(", 1)
    text = text.replace("gemm(B[i], W, out=C[i])\n", "gemm(B[i], W, out=C[i])\n    set_stream(main)\n")
    text = text.replace('user("fill", reads=[A[i]], writes=[B[i]])', 'user("other", reads=[A[i]])')
    text = text.replace("B = allocate(4)", "B = input(4)")
    assert lint(parse_program(text)).is_safe
    with pytest.raises(HostProgramError, match="an operation would run on another stream"):
        hoist_fork(parse_program(text))


def test_staging_that_would_be_overwritten_limits_prefetch():
    program = emit(Shape(op="gemm_rs", num_streams=4))
    assert lint(prefetch(program, 3)).is_safe
    with pytest.raises(HostProgramError, match="cannot prefetch: .*would no longer wait for"):
        prefetch(program, 5)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (hoist_fork, "no loop has a fork"),
        (hoist_join, "no loop has a join"),
        (lambda program: prefetch(program, 0), "at least 1, got 0"),
    ],
)
def test_nothing_to_do_is_told(change, expected):
    with pytest.raises(HostProgramError, match=expected):
        change(emit_hoisted_only())


def emit_hoisted_only():
    return parse_program(
        'program("x", ranks=1)\nmain = current_stream()\nA = output()\nuser("f", writes=[A])\n'
    )


def test_prefetch_of_a_synchronous_loop_has_nothing_to_wait_for():
    with pytest.raises(HostProgramError, match="no loop waits for communication"):
        prefetch(emit(Shape(asynchronous=False)), 1)
