"""The text of a program: what was printed is read back the same, and mistakes have a place."""

import itertools

import pytest

from aorta.programs.language.emit import COMMS, OPS, ORDERS, TILE_ORDERS, Shape, emit
from aorta.programs.language.expr import HostProgramError, index
from aorta.programs.language.ir import Gemm, Ref, UserOp
from aorta.programs.language.text import format_program, parse_program

EVERYTHING = """program("everything", ranks=3, note="a text", tiles=2)
main = current_stream()
A = input(2)
W = input()
b = input()
G = allocate(2, 3)
C = output(2, 3)
set_stream(side)
forked = record(main)
wait(forked)
for i in range(2):
    mine = select(G[i])
    user("fill", reads=[A[i]], writes=[mine], cost_us=1.5)
    linear(mine[rank], W, out=C[i, rank], bias=b)
    gemm(mine[rank], W, out=C[i, (rank + 1) % ranks], cost_us=2.0)
    for j in range(1, 2):
        sent[i] = send(G[i, rank], lane=p2p, to=(rank + 1) % ranks)
        got[i] = recv(out=G[i, (rank - 1) % ranks], lane=p2p, by=(rank - 1) % ranks)
        wait_work(sent[i])
        wait_work(got[i])
    broadcast(G[i, 0], out=G[i, 0], lane=comm[i % 2], root=0)
    all_to_all(G[i], out=G[i], lane=comm[i % 2])
done = record()
set_stream(main)
wait(done)
"""


def test_everything_that_the_grammar_has_is_read_and_printed_the_same():
    program = parse_program(EVERYTHING)
    assert format_program(program) == EVERYTHING
    assert parse_program(format_program(program)) == program


DEPTH_ONLY = [("ag_gemm", comm, "depth") for comm in COMMS if comm != "collective"]


@pytest.mark.parametrize(
    ("op", "comm", "tile_order"), [*itertools.product(OPS, ["collective"], TILE_ORDERS), *DEPTH_ONLY]
)
@pytest.mark.parametrize("order", ORDERS)
def test_emitted_programs_are_read_back_exactly(op, comm, order, tile_order):
    fork, join = ORDERS[order]
    shape = Shape(op=op, comm=comm, fork=fork, join=join, tile_order=tile_order, num_tiles=6, num_lanes=2)
    program = emit(shape)
    text = format_program(program)
    assert parse_program(text) == program
    assert format_program(parse_program(text)) == text


def test_lines_are_those_of_the_file_comments_and_blank_lines_included():
    program = parse_program(
        'program("x", ranks=1)\n\n# inputs\nA = input(2)\nC = output(2)\nW = input()\n'
        "for i in range(2):\n    # the product\n    gemm(A[i], W, out=C[i])\n"
    )
    gemms = [step.op for step in program.unroll() if isinstance(step.op, Gemm)]
    assert [op.line for op in gemms] == [9, 9]
    assert [op.out for op in gemms] == [Ref("C", (0,)), Ref("C", (1,))]


def test_selection_names_a_part_and_an_index_goes_below_it():
    first = next(step.op for step in parse_program(EVERYTHING).unroll(2) if isinstance(step.op, UserOp))
    assert first.outputs == (Ref("G", (0,)),)
    gemms = [step.op for step in parse_program(EVERYTHING).unroll(2) if isinstance(step.op, Gemm)]
    assert gemms[0].a == Ref("G", (0, 2))


HEAD = 'program("x", ranks=2)\nA = input(4)\nC = output(4)\nW = input()\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", "p:1: a program begins with", id="empty"),
        pytest.param("A = input(4)\n", "p:1: a program begins with", id="no-head"),
        pytest.param('program("x", ranks=0)\n', "p:1: ranks must be", id="no-ranks"),
        pytest.param(HEAD + "gemm(A[0], W, out=C[0]\n", "p:5: ", id="syntax"),
        pytest.param(HEAD + "gem(A[0], W, out=C[0])\n", "p:5: unknown instruction 'gem'", id="unknown"),
        pytest.param(HEAD + "gemm(A[0], W)\n", "p:5: out= is missing", id="missing-out"),
        pytest.param(HEAD + "gemm(A[0], W, out=C[0], fast=1)\n", "p:5: gemm: unexpected fast=", id="extra"),
        pytest.param(HEAD + "gemm(A[4], W, out=C[0])\n", r"p:5: A\[4\] is outside A\(4\)", id="outside"),
        pytest.param(HEAD + "gemm(A[0, 0], W, out=C[0])\n", "p:5: .* is outside", id="too-deep"),
        pytest.param(HEAD + "gemm(B[0], W, out=C[0])\n", "p:5: B is not a buffer", id="no-buffer"),
        pytest.param(HEAD + "gemm(A[k], W, out=C[0])\n", "p:5: unknown variable 'k'", id="no-variable"),
        pytest.param(HEAD + "gemm(A[1 % 0], W, out=C[0])\n", "p:5: .*divides by zero", id="zero"),
        pytest.param(HEAD + "gemm(A[f(1)], W, out=C[0])\n", r"p:5: 'f\(1\)' is not an index", id="call"),
        pytest.param(HEAD + "gemm(A[1.5], W, out=C[0])\n", "p:5: '1.5' is not an index", id="float"),
        pytest.param(HEAD + "x = wait(e)\n", "p:5: wait has no result to assign", id="assigned"),
        pytest.param(HEAD + "record(A)\n", "p:5: the result of record needs a name", id="unnamed"),
        pytest.param(HEAD + "import os\n", "p:5: not an instruction: import os", id="python"),
        pytest.param(HEAD + "while True:\n    wait(e)\n", "p:5: not an instruction", id="while"),
        pytest.param(HEAD + "for i in A:\n    wait(e)\n", "p:5: not an instruction", id="other-loop"),
        pytest.param(HEAD + "for rank in range(2):\n    wait(e)\n", "p:5: rank is not free", id="reserved"),
        pytest.param(
            HEAD + "for i in range(2):\n    B = allocate(2)\n", "p:6: B is allocated in a loop", id="alloc"
        ),
        pytest.param(
            HEAD + "for i in range(10**9):\n    wait(e)\n", "p:5: '10 \\*\\* 9' is not an index", id="power"
        ),
        pytest.param(
            HEAD + "for i in range(999999999):\n    wait(e)\n",
            "p: the loops unroll to more",
            id="long",
            marks=pytest.mark.heavy,
        ),
        pytest.param(HEAD + "x = all_gather(A[0], out=C[0])\n", "p:5: lane= is missing", id="no-lane"),
        pytest.param(HEAD + "x = send(A[0], lane=l)\n", "p:5: send needs to=", id="no-target"),
        pytest.param(HEAD + "x = send(A[0], lane=l, to=2)\n", "p:5: send: rank 2 of 2", id="no-rank"),
        pytest.param(
            HEAD + "x = all_reduce(A[0], out=A[0], lane=l, root=0)\n",
            "p:5: all_reduce has no root=",
            id="root",
        ),
        pytest.param(
            HEAD + "main = current_stream()\nother = current_stream()\n",
            "p:6: other would be a second name",
            id="two-names",
        ),
        pytest.param(HEAD + "gemm(A[0], W, out=C[0], cost_us=1e999)\n", "p:5: .*is not a time", id="cost"),
        pytest.param('program("x", ranks=9999)\n', "p:1: ranks must be 1 to 1024", id="many-ranks"),
        pytest.param('program("x", ranks=2)\nC = output(100, 101)\n', "p:2: .*at most 10,000", id="tiles"),
        pytest.param(f'program("x", ranks=2)\nC = output({10**40})\n', "p:2: .*at most", id="huge-tiles"),
        pytest.param(HEAD + "gemm(A[0], W, out=C[1if])\n", "p:5: ", id="number-and-word"),
        pytest.param("\0", "p: not a host program|p:", id="nul"),
        pytest.param(
            HEAD + "gemm(A[" + "(" * 300 + "0" + ")" * 300 + "], W, out=C[0])", "p:5: ", id="nested"
        ),
        pytest.param(HEAD + "gemm(A[" + "+".join("1" * 900) + "], W, out=C[0])", "p", id="long-sum"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_mistake_is_one_line_with_its_place(text, expected):
    with pytest.raises(HostProgramError, match=f"^{expected}") as caught:
        parse_program(text, "p")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [("3", 3), ("2 * 3 - 1", 5), ("i%4", "i % 4"), ("(i+1)%4", "(i + 1) % 4"), ("-1 % 4", 3)],
)
def test_indices_have_one_spelling(text, canonical):
    assert str(index(text)) == str(canonical)
