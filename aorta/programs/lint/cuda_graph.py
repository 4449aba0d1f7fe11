"""Happens-before graph of a captured CUDA graph, read from DOT (torch's CUDAGraph.debug_dump) or JSON.

The JSON is {"nodes": [{"name": "ncclDevKernel_AllGather_RING_LL"}, ...], "edges": [[0, 1], ...]}, nodes in
the order of capture. Capture turns records and waits into edges, so the edges are all there is.
"""

import re
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import msgspec

from aorta.errors import NOT_JSON
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.graph import Graph, Node
from aorta.traces.classify import COMM_RULES, Classifier, CommRule

NODE = re.compile(r'"(?P<id>[^"\n]+)"\s*\[(?:[^\]"]*\s)?label\s*=\s*"(?P<label>(?:[^"\\]|\\.)*)"', re.DOTALL)
EDGE = re.compile(r'"(?P<source>[^"\n]+)"\s*->\s*"(?P<target>[^"\n]+)"')
QUOTED_ATTRIBUTE = re.compile(r'\b(?:style|shape|color|fillcolor)\s*=\s*"[^"]*"')
KERNEL_NAME = re.compile(r"[|{]\s*(?P<name>[^|{}\s][^|{}]*?)\s*\\<\\<\\<")
NUMBER = re.compile(r"\d+")


class _JsonNode(msgspec.Struct):
    name: str


class _JsonGraph(msgspec.Struct):
    nodes: list[_JsonNode]
    edges: list[tuple[int, int]]


def read_graph(path: Path | str, rules: Sequence[CommRule] = COMM_RULES) -> Graph:
    """Graph of a .dot or .json file, nodes in an order in which every edge points forward.

    Raises HostProgramError for a file that is neither, that has no nodes, or whose edges make a cycle.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise HostProgramError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise HostProgramError(f"{path} is not text") from None
    if text.lstrip().startswith("{"):
        names, edges = _from_json(text, path)
    else:
        names, edges = _from_dot(text, path)
    if not names:
        raise HostProgramError(
            f"{path} has no graph nodes: it needs DOT of debug_dump or nodes and edges in JSON"
        )
    return _ordered(names, edges, path, rules)


def _from_json(text: str, path: Path | str) -> tuple[list[str], list[tuple[int, int]]]:
    try:
        graph = msgspec.json.decode(text, type=_JsonGraph)
    except NOT_JSON as error:
        raise HostProgramError(f"{path} is not a graph: {error}") from None
    for edge in graph.edges:
        if not all(0 <= node < len(graph.nodes) for node in edge):
            raise HostProgramError(f"{path}: edge {list(edge)} names a node that does not exist")
    return [node.name for node in graph.nodes], graph.edges


def _from_dot(text: str, path: Path | str) -> tuple[list[str], list[tuple[int, int]]]:
    text = QUOTED_ATTRIBUTE.sub("", text)
    labels = {match["id"]: match["label"] for match in NODE.finditer(text)}
    # The number at the end of an id is the order of capture; the file's order may differ.
    ids = sorted(labels, key=lambda name: [int(number) for number in NUMBER.findall(name)])
    place = {name: index for index, name in enumerate(ids)}
    edges = []
    for match in EDGE.finditer(text):
        if match["source"] not in place or match["target"] not in place:
            raise HostProgramError(
                f"{path}: an edge from {match['source']} to {match['target']}, one is no node"
            )
        edges.append((place[match["source"]], place[match["target"]]))
    return [_name(labels[name]) for name in ids], edges


def _name(label: str) -> str:
    """Symbol of a kernel; for other nodes their kind."""
    kernel = KERNEL_NAME.search(label)
    if kernel is not None:
        return kernel["name"].rpartition("|")[2].strip()
    lines = [line.strip(" {}|") for line in label.replace("\\n", "\n").splitlines()]
    words = [line for line in lines if line and not line.isdigit()]
    return words[0] if words else "node"


def _ordered(
    names: list[str], edges: list[tuple[int, int]], path: Path | str, rules: Sequence[CommRule]
) -> Graph:
    predecessors: dict[int, set[int]] = {node: set() for node in range(len(names))}
    for source, target in edges:
        predecessors[target].add(source)
    try:
        order = _by_capture(predecessors)
    except CycleError:
        raise HostProgramError(f"{path}: the edges make a cycle") from None
    comm_classifier = Classifier(rules)
    graph = Graph()
    place: dict[int, int] = {}
    for node in order:
        is_comm = comm_classifier.comm_op(names[node]) is not None
        place[node] = graph.add(
            Node(names[node], "graph", is_data=True, is_communication=is_comm, line=node),
            [(place[u], "event") for u in sorted(predecessors[node])],
        )
    return graph


def _by_capture(predecessors: dict[int, set[int]]) -> list[int]:
    """Topological order that stays as close to the order of capture as the edges allow."""
    sorter = TopologicalSorter(predecessors)
    sorter.prepare()
    ready: list[int] = []
    order: list[int] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()])
        node = ready.pop(0)
        order.append(node)
        sorter.done(node)
    return order
