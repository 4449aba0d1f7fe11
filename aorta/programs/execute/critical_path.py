"""Least time of a program whose slices take what they take alone, if nothing else costs anything.

Any number of streams, each lane one collective at a time, the device one multiply at a time.
"""

import heapq

from aorta.programs.language.graph import Graph, graph_of
from aorta.programs.language.ir import Program
from aorta.programs.lint.one_rank import required_pairs


def critical_path_ms(
    program: Program, rank: int, comm_ms: float, gemm_ms: float, required_only: bool = False
) -> float:
    """comm_ms and gemm_ms: all slices of a kind together, shared out evenly.

    required_only leaves out event waits that the data does not need: what is left is the order within
    streams and lanes, and the data.
    """
    graph = graph_of(program, rank)
    inner = graph.data()[1:-1]
    num_comm = sum(graph.nodes[node].is_communication for node in inner)
    num_gemm = len(inner) - num_comm
    costs = [0.0] * len(graph.nodes)
    for node in inner:
        is_comm = graph.nodes[node].is_communication
        costs[node] = comm_ms / num_comm if is_comm else gemm_ms / num_gemm
    return _scheduled(graph, _predecessors(graph, required_only), costs)


def _predecessors(graph: Graph, required_only: bool) -> list[set[int]]:
    predecessors = [
        {u for u, reason in edges if not (required_only and reason == "event")}
        for edges in graph.predecessors
    ]
    if required_only:
        for u, v, _ in required_pairs(graph):
            predecessors[v].add(u)
    return predecessors


def _scheduled(graph: Graph, predecessors: list[set[int]], costs: list[float]) -> float:
    """First come, first served: what could begin earlier goes first, then what was issued earlier."""
    successors: list[list[int]] = [[] for _ in predecessors]
    missing = [len(edges) for edges in predecessors]
    for v, edges in enumerate(predecessors):
        for u in edges:
            successors[u].append(v)
    ends = [0.0] * len(predecessors)
    free: dict[str, float] = {}
    ready = [(0.0, v) for v, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    while ready:
        possible, v = heapq.heappop(ready)
        node = graph.nodes[v]
        start = possible
        if node.is_data:
            resource = node.stream if node.is_communication else "multiply"
            start = max(possible, free.get(resource, 0.0))
            free[resource] = start + costs[v]
        ends[v] = start + costs[v]
        for w in successors[v]:
            missing[w] -= 1
            if not missing[w]:
                heapq.heappush(ready, (max(ends[u] for u in predecessors[w]), w))
    return max(ends)
