"""Passes that rewrite host programs: hoist the fork, hoist the join, issue communication ahead.

Every pass ends with a check: each pair of operations that touch the same data, one of them writing, must
still be ordered by happens-before. A rewrite that would lose such an order is refused.
"""

from collections import Counter
from collections.abc import Callable

from aorta.programs.language.expr import HostProgramError, evaluate
from aorta.programs.language.graph import Graph, graph_of
from aorta.programs.language.ir import (
    DATA_OPS,
    Loop,
    Op,
    Program,
    Record,
    Ref,
    SetStream,
    Wait,
    WaitWork,
    with_variable,
)
from aorta.programs.language.text import format_op, format_program, parse_program
from aorta.programs.lint.one_rank import required_pairs

Key = tuple[str, int]
"""An operation of a rank: its text, and how many equal ones were before it."""


def hoist_fork(program: Program) -> Program:
    """Program with the forks of a loop (a worker waits for the main stream) in a loop of their own before it.

    Raises HostProgramError where no loop has a fork, or where an operation would no longer wait for
    one whose data it needs.
    """
    main = program.main_stream()
    return _checked(
        program,
        _hoisted(program, lambda body, place: _is_fork(body, place, main), in_front=True),
        "hoist the fork",
    )


def hoist_join(program: Program) -> Program:
    """Program with the joins of a loop (the main stream waits for a worker) in a loop of their own after it.

    Raises HostProgramError as hoist_fork does.
    """
    main = program.main_stream()
    return _checked(
        program,
        _hoisted(program, lambda body, place: _is_join(body, place, main), in_front=False),
        "hoist the join",
    )


def prefetch(program: Program, distance: int) -> Program:
    """Program whose loops issue tile i + distance, up to its first wait for communication, before tile i
    waits.

    With a distance of all tiles, everything is issued first (breadth). Raises HostProgramError where no
    loop waits for communication that it issued, or where a buffer would be overwritten too early.
    """
    if distance < 1:
        raise HostProgramError(f"prefetch distance must be at least 1, got {distance}")
    body: list[Op] = []
    is_prefetched = False
    for op in program.body:
        waits = _waits(op)
        if not isinstance(op, Loop) or not waits:
            body.append(op)
            continue
        is_prefetched = True
        body += _prefetched(op, op.body[: waits[0]], op.body[waits[0] :], distance)
    if not is_prefetched:
        raise HostProgramError("no loop waits for communication, there is nothing to prefetch")
    return _checked(program, _with_body(program, body), "prefetch")


def _waits(op: Op) -> list[int]:
    body = op.body if isinstance(op, Loop) else ()
    return [place for place, inner in enumerate(body) if isinstance(inner, WaitWork)]


def _prefetched(loop: Loop, issue: tuple[Op, ...], work: tuple[Op, ...], distance: int) -> list[Op]:
    start, stop = (_constant(bound, loop) for bound in (loop.start, loop.stop))
    num_ahead = min(distance, stop - start)
    stream = [op for op in issue if isinstance(op, SetStream)][-1:]
    following = (*stream, *work)
    shifted = tuple(with_variable(op, loop.variable, f"{loop.variable} + {num_ahead}") for op in issue)
    pieces = [
        (start, start + num_ahead, issue),
        (start, stop - num_ahead, (*shifted, *following)),
        (stop - num_ahead, stop, following),
    ]
    return [Loop(loop.variable, first, end, body) for first, end, body in pieces if first < end]


def _constant(bound: object, loop: Loop) -> int:
    if not isinstance(bound, int):
        raise HostProgramError(f"{format_op(loop)} has no fixed bounds, it cannot be cut")
    return bound


_Finder = Callable[[tuple[Op, ...], int], bool]


def _is_fork(body: tuple[Op, ...], place: int, main: str) -> bool:
    match body[place : place + 2]:
        case (Record(event=recorded, stream=Ref(name=stream)), Wait(event=waited)):
            return recorded == waited and stream == main and _current(body, place) not in (None, Ref(main))
    return False


def _is_join(body: tuple[Op, ...], place: int, main: str) -> bool:
    match body[place : place + 2]:
        case (Record(event=recorded, stream=Ref(name=stream)), Wait(event=waited)):
            return recorded == waited and stream != main and _current(body, place) == Ref(main)
    return False


def _current(body: tuple[Op, ...], place: int) -> Ref | None:
    """Stream that the body made current before this place; None where it made none."""
    return next((op.stream for op in reversed(body[:place]) if isinstance(op, SetStream)), None)


def _hoisted(program: Program, finds: _Finder, in_front: bool) -> Program:
    """Program with the pairs of instructions that finds() picks moved out of every loop at the top level."""
    hoisted: list[Op] = []
    body: list[Op] = []
    places: list[int] = []
    for place, op in enumerate(program.body):
        inner, moved = _split(op, finds)
        body.append(inner)
        if moved is not None:
            hoisted.append(_trimmed(program, moved))
            places.append(place)
    if not hoisted:
        raise HostProgramError(f"no loop has a {'fork' if in_front else 'join'} in it")
    place = places[0] if in_front else places[-1] + 1
    return _with_body(program, [*body[:place], *hoisted, *body[place:]])


def _split(op: Op, finds: _Finder) -> tuple[Op, Loop | None]:
    """A loop without the pairs, and a loop of the pairs alone. A loop without work was hoisted before."""
    if not isinstance(op, Loop) or not _has_work(op):
        return op, None
    inside: list[Op] = []
    moved: list[Op] = []
    skip = 0
    for place, inner in enumerate(op.body):
        if skip:
            skip -= 1
        elif isinstance(inner, Loop):
            remaining, moved_ops = _split(inner, finds)
            inside.append(remaining)
            moved += [] if moved_ops is None else [moved_ops]
        elif finds(op.body, place):
            stream = _current(op.body, place)
            assert stream is not None
            moved += [SetStream(stream), *op.body[place : place + 2]]
            skip = 1
        else:
            inside.append(inner)
    inside = _without_idle_switches(inside)
    loop = Loop(op.variable, op.start, op.stop, tuple(inside))
    return loop, Loop(op.variable, op.start, op.stop, tuple(moved)) if moved else None


def _has_work(op: Op) -> bool:
    return any(map(_has_work, op.body)) if isinstance(op, Loop) else isinstance(op, (*DATA_OPS, WaitWork))


def _without_idle_switches(body: list[Op]) -> list[Op]:
    """Body without switches of streams that nothing, or another switch, follows: they order nothing."""
    return [
        op
        for place, op in enumerate(body)
        if not isinstance(op, SetStream)
        or (place + 1 < len(body) and not isinstance(body[place + 1], SetStream))
    ]


def _trimmed(program: Program, loop: Loop) -> Loop:
    """Loop without the iterations at the end that only repeat earlier pairs of streams."""
    if any(isinstance(op, Loop) for op in loop.body):
        return loop
    constants = {"ranks": program.num_ranks, "rank": 0}
    start, stop = evaluate(loop.start, constants), evaluate(loop.stop, constants)
    streams = [
        ref for op in loop.body if isinstance(op, SetStream | Record) and (ref := op.stream) is not None
    ]

    def pairs(rank: int, value: int) -> tuple[str, ...]:
        variables = constants | {"rank": rank, loop.variable: value}
        return tuple(str(ref.at(variables)) for ref in streams)

    keep = start
    for rank in range(program.num_ranks):
        keys: set[tuple[str, ...]] = set()
        for value in range(start, stop):
            if pairs(rank, value) not in keys:
                keys.add(pairs(rank, value))
                keep = max(keep, value + 1)
    return Loop(loop.variable, loop.start, keep if keep < stop else loop.stop, loop.body)


def _with_body(program: Program, body: list[Op]) -> Program:
    """Program with a new body, lines of its new text, and without the params that it no longer follows."""
    params = tuple((key, value) for key, value in program.params if key not in ("order", "tile_order"))
    return parse_program(format_program(Program(program.name, program.num_ranks, tuple(body), params)))


def _checked(original: Program, changed: Program, change: str) -> Program:
    """The changed program; raises HostProgramError where it lacks an order that the data needs."""
    for rank in range(original.num_ranks):
        if _streams(original, rank) != _streams(changed, rank):
            raise HostProgramError(f"cannot {change}: an operation would run on another stream")
        broken = lost_dependency(graph_of(original, rank), graph_of(changed, rank))
        if broken is not None:
            earlier, later = broken
            raise HostProgramError(f"cannot {change}: {later} would no longer wait for {earlier}")
    return changed


def _streams(program: Program, rank: int) -> Counter[tuple[str, str]]:
    """Counts of operations with the stream on which they are issued."""
    steps = program.unroll(rank)
    return Counter((format_op(step.op), step.stream) for step in steps if isinstance(step.op, DATA_OPS))


def lost_dependency(original: Graph, changed: Graph) -> tuple[str, str] | None:
    """Two operations that the data needs in order and that changed does not order so; None where all are.

    Both graphs must have the same operations; they are matched by their text. A pair that the original does
    not order either (a race) must at least be issued in the same order.
    """
    keys, new_keys = _keys(original), _keys(changed)
    if set(keys.values()) != set(new_keys.values()):
        lost = next(iter(set(keys.values()) ^ set(new_keys.values())))
        return "nothing", lost[0]
    place = {key: index for index, key in new_keys.items()}
    order, changed_order = original.precedence(), changed.precedence()
    for u, v, _ in required_pairs(original):
        a, b = place[keys[u]], place[keys[v]]
        if (order.is_before(u, v) and not changed_order.is_before(a, b)) or b < a:
            return original.nodes[u].label, original.nodes[v].label
    return None


def _keys(graph: Graph) -> dict[int, Key]:
    times: Counter[str] = Counter()
    keys = {}
    for index in graph.data():
        label = graph.nodes[index].label
        keys[index] = (label, times[label])
        times[label] += 1
    return keys
