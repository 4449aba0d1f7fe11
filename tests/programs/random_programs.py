"""Random host programs for properties: a few streams, lanes and buffers, any order of instructions. And one
of whose forks the data needs all."""

from hypothesis import strategies as st

from aorta.programs.language.emit import COMMS, OPS, PLACES, Shape
from aorta.programs.language.ir import (
    Allocate,
    Communicate,
    Gemm,
    GetCurrentStream,
    Op,
    Program,
    Record,
    Ref,
    SetStream,
    UserOp,
    Wait,
    WaitWork,
)

STREAMS = [Ref("main"), Ref("worker", (0,)), Ref("worker", (1,))]
PARTS = [Ref("X", (0,)), Ref("X", (1,)), Ref("X"), Ref("Y", (0,))]

MAIN_FILLS = """program("filled", ranks=1)
main = current_stream()
A = input(4)
B = allocate(4)
C = output(4)
W = input()
for i in range(4):
    set_stream(main)
    user("fill", reads=[A[i]], writes=[B[i]])
    set_stream(worker[i % 2])
    forked[i] = record(main)
    wait(forked[i])
    gemm(B[i], W, out=C[i])
for i in range(2):
    set_stream(main)
    joined[i] = record(worker[i])
    wait(joined[i])
"""
"""The caller's stream fills what the workers multiply: every fork in the loop orders data."""


@st.composite
def programs(draw: st.DrawFn, max_size: int = 12) -> Program:
    """Buffers are inputs and outputs alike, so that no read is of nothing."""
    body: list[Op] = [
        GetCurrentStream("main"),
        Allocate("X", (2,), "input"),
        Allocate("Y", (1,), "input"),
        Allocate("Z", (1,), "output"),
        UserOp("clear", (), (Ref("Z", (0,)),)),
    ]
    works: list[Ref] = []
    for number in range(draw(st.integers(1, max_size))):
        kind = draw(st.sampled_from(["stream", "record", "wait", "gemm", "user", "comm", "work"]))
        match kind:
            case "stream":
                body.append(SetStream(draw(st.sampled_from(STREAMS))))
            case "record":
                stream = draw(st.sampled_from([None, *STREAMS]))
                body.append(Record(Ref("e", (draw(st.integers(0, 1)),)), stream))
            case "wait":
                body.append(Wait(Ref("e", (draw(st.integers(0, 1)),))))
            case "gemm":
                a, out = draw(st.sampled_from(PARTS)), draw(st.sampled_from(PARTS))
                body.append(Gemm(a, Ref("Y"), out))
            case "user":
                inputs = draw(st.lists(st.sampled_from(PARTS), max_size=2))
                outputs = draw(st.lists(st.sampled_from(PARTS), max_size=1))
                body.append(UserOp(f"op{number}", tuple(inputs), tuple(outputs)))
            case "comm":
                lane, part = Ref("comm", (draw(st.integers(0, 1)),)), draw(st.sampled_from(PARTS))
                work = Ref("w", (number,)) if draw(st.booleans()) else None
                works += [work] if work is not None else []
                body.append(Communicate("all_reduce", part, part, lane, work))
            case "work" if works:
                body.append(WaitWork(draw(st.sampled_from(works))))
    return Program("random", 1, tuple(body))


@st.composite
def shapes(draw: st.DrawFn, planted: bool = False) -> Shape:
    """Shapes that emit accepts; planted ones may lack the fork or have too few staging buffers."""
    op = draw(st.sampled_from(OPS))
    comm = draw(st.sampled_from(COMMS)) if op == "ag_gemm" else "collective"
    num_ranks = draw(st.integers(1, 3))
    tiles = draw(st.integers(1, 3)) * num_ranks if comm != "collective" else draw(st.integers(1, 7))
    breadth = comm == "collective" and draw(st.booleans())
    staging = draw(st.none() | st.integers(1, 4)) if planted and op == "gemm_rs" else None
    return Shape(
        op=op,
        comm=comm,
        fork=draw(st.sampled_from(PLACES if planted else PLACES[:2])),
        join=draw(st.sampled_from(PLACES[:2])),
        tile_order="breadth" if breadth else "depth",
        num_tiles=tiles,
        num_streams=draw(st.integers(1, 5)),
        num_lanes=draw(st.integers(1, 2)),
        num_ranks=num_ranks,
        num_staging=staging,
        asynchronous=comm != "collective" or breadth or draw(st.booleans()),
    )
