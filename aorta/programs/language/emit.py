"""Overlapped matrix multiplies as host programs: one loop, and where its fork and join stand.

S tiles, n worker streams, D ranks; tile i belongs to worker i % n. `fork` makes a worker wait for the
caller's stream, `join` makes the caller's stream wait for a worker. Each may stand in the loop over tiles
or in a loop of its own. An event captures a stream when it is recorded, so with both in the loop the
fork of tile i+1 also waits for tile i.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from aorta.programs.language.expr import HostProgramError, index
from aorta.programs.language.ir import (
    Allocate,
    CommOp,
    Communicate,
    Gemm,
    GetCurrentStream,
    Loop,
    Op,
    Program,
    Record,
    Ref,
    Role,
    SetStream,
    Wait,
    WaitWork,
)
from aorta.programs.language.text import MAX_RANKS, format_program, parse_program

OpName = Literal["ag_gemm", "gemm_rs", "gemm_ar"]
Comm = Literal["collective", "ring", "pairwise"]
Place = Literal["in_loop", "hoisted", "none"]
TileOrder = Literal["depth", "breadth"]

OPS: tuple[str, ...] = get_args(OpName)
DTYPE_NAMES = ("bf16", "fp16", "fp32", "fp64")
COMMS: tuple[str, ...] = get_args(Comm)
PLACES: tuple[str, ...] = get_args(Place)
TILE_ORDERS: tuple[str, ...] = get_args(TileOrder)

ORDERS: dict[str, tuple[Place, Place]] = {
    "factorized": ("in_loop", "in_loop"),
    "developed": ("hoisted", "in_loop"),
    "join_hoisted": ("in_loop", "hoisted"),
    "both_hoisted": ("hoisted", "hoisted"),
}
"""Places of fork and join by the order's name; factorized and developed are nvFuser's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of the program to emit."""

    op: OpName = "ag_gemm"
    fork: Place = "hoisted"
    """Place of the fork; none plants a race: the workers never wait for the caller's stream."""
    join: Place = "hoisted"
    tile_order: TileOrder = "depth"
    """depth: communicate and compute tile by tile; breadth: one phase for all tiles, then the other."""
    num_tiles: int = 8
    num_streams: int = 4
    num_lanes: int = 1
    """Number of process groups; tile i uses lane i % lanes."""
    num_ranks: int = 2
    comm: Comm = "collective"
    asynchronous: bool = True
    """False: collectives run on the worker stream itself, as async_op=False does in torch since 2.8."""
    num_staging: int | None = None
    """Number of gemm_rs's staging buffers. Default: one per stream, or per tile in breadth."""


def emit(shape: Shape) -> Program:
    """Program of a shape; its instructions have the lines of its text.

    Raises HostProgramError for a combination that has no meaning, or that would make ranks communicate
    in different orders.
    """
    _check(shape)
    body = _EMITTERS[shape.op if shape.comm == "collective" else shape.comm](shape)
    program = Program(shape.op, shape.num_ranks, tuple(body), _params(shape))
    return parse_program(format_program(program))


def _params(shape: Shape) -> tuple[tuple[str, int | str], ...]:
    """Parameters in the head of the program's text."""
    name_of = {places: name for name, places in ORDERS.items()}
    params: dict[str, int | str] = {
        "order": name_of.get((shape.fork, shape.join), f"{shape.fork}/{shape.join}"),
        "tile_order": shape.tile_order,
        "tiles": shape.num_tiles,
        "streams": shape.num_streams,
    }
    if shape.num_lanes > 1:
        params["lanes"] = shape.num_lanes
    if shape.comm != "collective":
        params["comm"] = shape.comm
    return tuple(params.items())


def _check(shape: Shape) -> None:
    counts = {"tiles": shape.num_tiles, "streams": shape.num_streams, "lanes": shape.num_lanes}
    counts |= {"ranks": shape.num_ranks}
    if shape.num_staging is not None:
        counts["staging buffers"] = shape.num_staging
    for name, value in counts.items():
        if value < 1:
            raise HostProgramError(f"{name} must be at least 1, got {value}")
    if shape.num_ranks > MAX_RANKS:
        raise HostProgramError(f"ranks must be at most {MAX_RANKS}, got {shape.num_ranks}")
    if shape.num_staging is not None and shape.op != "gemm_rs":
        raise HostProgramError(f"{shape.op} has no staging buffers; only gemm_rs does")
    if shape.join == "none":
        raise HostProgramError("join is in_loop or hoisted: without it the results are never safe to read")
    if shape.comm != "collective":
        _check_point_to_point(shape)


def _check_point_to_point(shape: Shape) -> None:
    if shape.op != "ag_gemm":
        raise HostProgramError(f"--comm {shape.comm} is there for ag_gemm, not for {shape.op}")
    if shape.num_tiles % shape.num_ranks:
        raise HostProgramError(
            f"--comm {shape.comm} needs tiles to be a multiple of ranks, "
            f"got {shape.num_tiles} tiles on {shape.num_ranks} ranks"
        )
    if shape.tile_order != "depth":
        raise HostProgramError(f"--comm {shape.comm} is depth order already")
    if not shape.asynchronous:
        raise HostProgramError(f"--comm {shape.comm} is asynchronous: both sides post before either waits")


def _ag_gemm(shape: Shape) -> list[Op]:
    tiles = (shape.num_tiles,)
    head = _head(shape, {"A": (tiles, "input"), "G": (tiles, "scratch"), "C": (tiles, "output")})
    gather = _communicate(shape, "all_gather", "gathered", "A[i]", "G[i]")
    return head + _around(shape, _phases(shape, [*gather, _gemm("G[i]", "C[i]")]))


def _gemm_rs(shape: Shape) -> list[Op]:
    num_staging = shape.num_staging or (
        shape.num_tiles if shape.tile_order == "breadth" else min(shape.num_tiles, shape.num_streams)
    )
    tiles = (shape.num_tiles,)
    head = _head(shape, {"A": (tiles, "input"), "P": ((num_staging,), "scratch"), "C": (tiles, "output")})
    part = "P[i]" if num_staging >= shape.num_tiles else f"P[i % {num_staging}]"
    scatter = _communicate(shape, "reduce_scatter", "scattered", part, "C[i]")
    return head + _around(shape, _phases(shape, [_gemm("A[i]", part), *scatter]))


def _gemm_ar(shape: Shape) -> list[Op]:
    tiles = (shape.num_tiles,)
    head = _head(shape, {"A": (tiles, "input"), "C": (tiles, "output")})
    reduce = _communicate(shape, "all_reduce", "reduced", "C[i]", "C[i]")
    return head + _around(shape, _phases(shape, [_gemm("A[i]", "C[i]"), *reduce]))


def _ring(shape: Shape) -> list[Op]:
    """Gather by a ring: step j passes on the slice of step j-1, and computes with the one that it receives.

    A send reads what the receive before it on the same lane wrote: the lane's order keeps that safe.
    """
    first = _exchange(shape, "A[i]", "(rank - 1) % ranks", "(rank + 1) % ranks", "(rank - 1) % ranks")
    exchanged = _exchange(
        shape,
        "G[i, (rank - j + 1) % ranks]",
        "(rank - j) % ranks",
        "(rank + 1) % ranks",
        "(rank - 1) % ranks",
    )
    steps: list[Op] = [_step(shape, [_gemm("A[i]", "C[i, rank]")], "i", "i")]
    if shape.num_ranks > 1:
        steps.append(_step(shape, first, "i + 1", "i, 1"))
    if shape.num_ranks > 2:
        steps.append(Loop("j", 2, shape.num_ranks, (_step(shape, exchanged, "i + j", "i, j"),)))
    return _point_to_point(shape, steps)


def _pairwise(shape: Shape) -> list[Op]:
    """Gather by pairs: step j receives rank+j's own shard and sends its own to rank-j, forwarding none."""
    exchange = _exchange(shape, "A[i]", "(rank + j) % ranks", "(rank - j) % ranks", "(rank + j) % ranks")
    steps: list[Op] = [_step(shape, [_gemm("A[i]", "C[i, rank]")], "i", "i")]
    if shape.num_ranks > 1:
        steps.append(Loop("j", 1, shape.num_ranks, (_step(shape, exchange, "i + j", "i, j"),)))
    return _point_to_point(shape, steps)


_EMITTERS: dict[str, Callable[[Shape], list[Op]]] = {
    "ag_gemm": _ag_gemm,
    "gemm_rs": _gemm_rs,
    "gemm_ar": _gemm_ar,
    "ring": _ring,
    "pairwise": _pairwise,
}


def _point_to_point(shape: Shape, steps: list[Op]) -> list[Op]:
    num_rings = shape.num_tiles // shape.num_ranks
    slices = (num_rings, shape.num_ranks)
    head = _head(shape, {"A": ((num_rings,), "input"), "G": (slices, "scratch"), "C": (slices, "output")})
    workers = min(shape.num_tiles, shape.num_streams)
    forks = [Loop("i", 0, workers, _fork(shape, "i", "i"))] if shape.fork == "hoisted" else []
    joins = [Loop("i", 0, workers, _join(shape, "i", "i"))] if shape.join == "hoisted" else []
    return [*head, *forks, *steps, *joins]


def _step(shape: Shape, work: list[Op], worker: str, event: str) -> Loop:
    """Loop over all rings for one step; rings go to different workers, and so do the steps of one ring."""
    ops: list[Op] = [SetStream(_worker(shape, worker))]
    if shape.fork == "in_loop":
        ops += _fork(shape, worker, event)[1:]
    ops += work
    if shape.join == "in_loop":
        ops += _join(shape, worker, event)
    return Loop("i", 0, shape.num_tiles // shape.num_ranks, tuple(ops))


def _exchange(shape: Shape, source: str, received: str, to: str, by: str) -> list[Op]:
    work = "received[i, j]" if "j" in source + received else "received[i, 1]"
    return [
        Communicate(
            "send_recv",
            _reference(source),
            _reference(f"G[i, {received}]"),
            _lane(shape),
            _reference(work),
            to=index(to),
            by=index(by),
        ),
        WaitWork(_reference(work)),
        _gemm(f"G[i, {received}]", f"C[i, {received}]"),
    ]


def _phases(shape: Shape, work: list[Op]) -> list[list[Op]]:
    """Work of a tile in one piece, or for breadth split where its stream waits for its communication."""
    if shape.tile_order == "depth":
        return [work]
    waits = [place for place, op in enumerate(work) if isinstance(op, WaitWork)]
    if not waits:
        raise HostProgramError(
            "breadth issues all tiles before it waits: it needs asynchronous communication"
        )
    return [work[: waits[0]], work[waits[0] :]]


def _around(shape: Shape, phases: list[list[Op]]) -> list[Op]:
    """One loop per phase, with the fork before or in the first one and the join in or after the last one."""
    workers = min(shape.num_tiles, shape.num_streams)
    ops: list[Op] = []
    if shape.fork == "hoisted":
        ops.append(Loop("i", 0, workers, _fork(shape, "i", "i")))
    for number, phase in enumerate(phases):
        body: list[Op] = [SetStream(_worker(shape, "i"))]
        if shape.fork == "in_loop" and number == 0:
            body += _fork(shape, "i", "i")[1:]
        body += phase
        if shape.join == "in_loop" and number == len(phases) - 1:
            body += _join(shape, "i", "i")
        ops.append(Loop("i", 0, shape.num_tiles, tuple(body)))
    if shape.join == "hoisted":
        ops.append(Loop("i", 0, workers, _join(shape, "i", "i")))
    return ops


def _fork(shape: Shape, tile: str, event: str) -> tuple[Op, ...]:
    forked = _reference(f"forked[{event}]")
    return (SetStream(_worker(shape, tile)), Record(forked, Ref("main")), Wait(forked))


def _join(shape: Shape, tile: str, event: str) -> tuple[Op, ...]:
    joined = _reference(f"joined[{event}]")
    return (SetStream(Ref("main")), Record(joined, _worker(shape, tile)), Wait(joined))


def _head(shape: Shape, buffers: dict[str, tuple[tuple[int, ...], Role]]) -> list[Op]:
    ops: list[Op] = [GetCurrentStream("main")]
    ops += [Allocate(name, tiles, role) for name, (tiles, role) in buffers.items()]
    ops.insert(2, Allocate("W", (), "input"))
    return ops


def _gemm(a: str, out: str) -> Gemm:
    return Gemm(_reference(a), Ref("W"), _reference(out))


def _communicate(shape: Shape, op: CommOp, work: str, source: str, out: str) -> list[Op]:
    if not shape.asynchronous:
        return [Communicate(op, _reference(source), _reference(out), _lane(shape))]
    event = _reference(f"{work}[i]")
    return [Communicate(op, _reference(source), _reference(out), _lane(shape), event), WaitWork(event)]


def _lane(shape: Shape) -> Ref:
    return Ref("comm") if shape.num_lanes == 1 else _reference(f"comm[i % {shape.num_lanes}]")


def _worker(shape: Shape, tile: str) -> Ref:
    tile = tile if tile.isidentifier() else f"({tile})"
    return _reference(f"worker[{tile} % {shape.num_streams}]")


def _reference(text: str) -> Ref:
    name, _, parts = text.removesuffix("]").partition("[")
    return Ref(name, tuple(index(part) for part in parts.split(",")) if parts else ())
