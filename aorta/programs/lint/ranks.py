"""Check that a program's ranks issue the same communication in the same order, without a circle of waits.

A mismatch is not an error at run time. NCCL hangs, gloo may even add the wrong tensors silently.
"""

from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest

from aorta.programs.language.graph import Graph
from aorta.programs.language.ir import Communicate, Program
from aorta.timeline.collective import POINT_TO_POINT

MAX_SHOWN = 3
"""Number of mismatches that are listed; one wrong program shows on all other ranks."""


def rank_mismatches(programs: Sequence[Program], graphs: Sequence[Graph]) -> list[str]:
    """One line per way in which the ranks do not meet; empty where they do.

    programs: one of all ranks or one per rank; graphs: one per rank.
    """
    queues = [list(_communications(_program_of(programs, rank), rank)) for rank in range(len(graphs))]
    mismatches = [*_collective_mismatches(queues), *_point_to_point_mismatches(queues)]
    return mismatches[:MAX_SHOWN] or list(_circles(graphs, queues))


def _program_of(programs: Sequence[Program], rank: int) -> Program:
    return programs[rank] if len(programs) > 1 else programs[0]


def _communications(program: Program, rank: int) -> Iterator[Communicate]:
    for step in program.unroll(rank % program.num_ranks):
        if isinstance(step.op, Communicate):
            yield step.op


def _collective_mismatches(queues: list[list[Communicate]]) -> Iterator[str]:
    lanes = dict.fromkeys(str(op.lane) for queue in queues for op in queue)
    for lane in lanes:
        rows = [
            [_meaning(op) for op in queue if str(op.lane) == lane and _is_collective(op)] for queue in queues
        ]
        for rank, row in enumerate(rows[1:], start=1):
            for place, (mine, expected) in enumerate(zip_longest(rows[0], row, fillvalue="nothing")):
                if mine != expected:
                    yield f"{lane}, communication {place}: rank 0 issues {mine}, rank {rank} {expected}"
                    break


def _point_to_point_mismatches(queues: list[list[Communicate]]) -> Iterator[str]:
    sent, received = _pairs(queues)
    for key in sent | received:
        lane, source, target = key
        if len(sent.get(key, ())) != len(received.get(key, ())):
            yield (
                f"{lane}: rank {source} sends {len(sent.get(key, ()))} times to rank {target}, "
                f"which receives {len(received.get(key, ()))} times from it"
            )
            continue
        for place, ((_, send), (_, recv)) in enumerate(zip(sent[key], received[key], strict=True)):
            if send.work is not None and recv.work is not None and _named(send) != _named(recv):
                yield (
                    f"{lane}, transfer {place} from rank {source} to rank {target}: "
                    f"sent as {send.work}, received as {recv.work}"
                )
                break


def _named(op: Communicate) -> object:
    """Name by which both sides of a coalesced exchange are matched; None: they are matched by order."""
    return op.work if op.op == "send_recv" else None


_Transfers = dict[tuple[str, int, int], list[tuple[int, Communicate]]]


def _pairs(queues: list[list[Communicate]]) -> tuple[_Transfers, _Transfers]:
    """Sends and receives by (lane, source, target), in order, with their place in the rank's queue."""
    sent: _Transfers = {}
    received: _Transfers = {}
    for rank, queue in enumerate(queues):
        for place, op in enumerate(queue):
            if isinstance(op.to, int):
                sent.setdefault((str(op.lane), rank, op.to), []).append((place, op))
            if isinstance(op.by, int):
                received.setdefault((str(op.lane), op.by, rank), []).append((place, op))
    return sent, received


def _circles(graphs: Sequence[Graph], queues: list[list[Communicate]]) -> Iterator[str]:
    """Sentence about ranks that wait for each other.

    Communications that meet become one node of a graph of all ranks, which must have no cycle.
    """
    meeting = _meetings(queues)
    sorter: TopologicalSorter[tuple[int, int]] = TopologicalSorter()
    for rank, graph in enumerate(graphs):
        name = _names(graph, rank, meeting)
        for v, edges in enumerate(graph.predecessors):
            sorter.add(name[v], *(name[u] for u, _ in edges if name[u] != name[v]))
    try:
        sorter.prepare()
    except CycleError as error:
        names = {
            name: node for rank, graph in enumerate(graphs) for name, node in _labels(graph, rank, meeting)
        }
        labels = list(dict.fromkeys(names[name] for name in error.args[1] if name in names))
        yield f"ranks wait for each other: {' -> '.join(labels[:6])}"


def _meetings(queues: list[list[Communicate]]) -> dict[tuple[int, int], tuple[int, int]]:
    """Communication that stands for all that must meet, by (rank, place in its queue)."""
    parent = {
        (rank, place): (rank, place) for rank, queue in enumerate(queues) for place in range(len(queue))
    }

    def root(item: tuple[int, int]) -> tuple[int, int]:
        while parent[item] != item:
            item = parent[item]
        return item

    collectives: dict[tuple[str, int], tuple[int, int]] = {}
    for rank, queue in enumerate(queues):
        counts: dict[str, int] = {}
        for place, op in enumerate(queue):
            if _is_collective(op):
                lane = str(op.lane)
                first = collectives.setdefault((lane, counts.get(lane, 0)), (rank, place))
                counts[lane] = counts.get(lane, 0) + 1
                parent[root((rank, place))] = root(first)
    sent, received = _pairs(queues)
    for key, sends in sent.items():
        for (at_source, _), (at_target, _) in zip(sends, received[key], strict=True):
            parent[root((key[1], at_source))] = root((key[2], at_target))
    return {item: root(item) for item in parent}


def _names(graph: Graph, rank: int, meeting: dict[tuple[int, int], tuple[int, int]]) -> list[tuple[int, int]]:
    """Name of each node: that of its meeting, or (-1 - rank, number) for a rank's own work."""
    names, place = [], 0
    for number, node in enumerate(graph.nodes):
        if node.is_communication:
            names.append(meeting[rank, place])
            place += 1
        else:
            names.append((-1 - rank, number))
    return names


def _labels(
    graph: Graph, rank: int, meeting: dict[tuple[int, int], tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], str]]:
    for name, node in zip(_names(graph, rank, meeting), graph.nodes, strict=True):
        if node.is_communication:
            yield name, f"{node.label.partition('(')[0]} at line {node.line} (rank {rank})"


def _is_collective(op: Communicate) -> bool:
    return op.op not in POINT_TO_POINT


def _meaning(op: Communicate) -> str:
    """Text on which all ranks must agree: operation, tile that it fills or reads, root."""
    part = op.out if op.out is not None else op.source
    tile = "" if part is None or not part.index else str(list(part.index))
    root = "" if op.root is None else f" from rank {op.root}"
    return f"{op.op}{tile}{root}"
