"""Calls of torch.autograd.grad, in a few steps, that go through a graph again for one more input of it: u by
x, and then u by t. One call for both goes through it once, and what it makes later passes go through once.
"""

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

import torch

from aorta.attach.backward_graphs import Graph, graph_of, num_products
from aorta.attach.call_flops import line_of_caller
from aorta.attach.loss_loops import VIEWS
from aorta.device.backend import backend_of
from aorta.records.schema import DerivativeCalls
from aorta.records.stacks import StackFrame

COMPUTE_NOTHING = (*VIEWS, "Split", "Slice", "Select", "Accumulate")
"""In names of operators."""
_Parts = tuple[Any, Any]
"""Of products, which may take all the time, and of all operators, where each is alike."""
NONE: _Parts = (0.0, 0.0)


def _nums(operators: set[Any]) -> tuple[int, int]:
    """Matrix products, and all beside views."""
    computing = sum(not any(part in one.name() for part in COMPUTE_NOTHING) for one in operators)
    return num_products(operators), computing


class _Asked(NamedTuple):
    """A call of grad()."""

    inputs: set[Any]
    """Where gradients come to them."""
    given: tuple[Any, ...]
    """Gradients of the outputs that it begins with."""
    way: set[Any]
    """Operators that it goes through."""


class _Open(NamedTuple):
    key: Any
    """The outputs."""
    before: set[Any]
    """Operators that the outputs depend on."""
    parts_again: _Parts
    """Of it, that a call before it had; tensors, where a device compares."""


class Derivatives:
    def __init__(self) -> None:
        self._asked: dict[Any, list[_Asked]] = {}
        """By outputs, in the open step, as all that follows."""
        self._open: list[_Open | None] = []
        self._made: dict[Any, list[tuple[set[Any], _Parts]]] = defaultdict(list)
        """By outputs, graphs that calls made, with their parts_again."""
        self._seen: set[Any] = set()
        self._again: list[Any] = [*NONE]
        self._total = [0, 0]
        self._num = 0
        self._num_again: Any = 0.0
        self._at: dict[StackFrame | None, Any] = defaultdict(float)
        self._steps: list[tuple[Any, ...]] = []
        """Parts that are done again, calls, and those for one more input, of each step."""

    def begins(
        self, graph: Graph, roots: Iterable[Any], given: Iterable[Any], inputs: Iterable[Any], adds: bool
    ) -> None:
        """A pass through the graph of these roots does. adds: to gradients of parameters; else it is a call
        of grad() for these inputs."""
        self._open.append(None)
        followed = {**graph.followed, **graph.sums}
        if adds:
            self._count(set(followed), 2)
            return
        edges = [torch.autograd.graph.get_gradient_edge(one) for one in inputs]
        way = _way_to([one.node for one in edges], followed)
        asked = _Asked({(one.node, one.output_nr) for one in edges}, tuple(given), way)
        key = tuple((one.grad_fn, one.output_nr) for one in roots)
        before = self._asked.setdefault(key, [])
        shared = way & set[Any]().union(*(one.way for one in before))
        is_again = _are_alike(asked, before) if shared else 0.0
        before.append(asked)
        self._at[line_of_caller()] += is_again
        self._num, self._num_again = self._num + 1, self._num_again + is_again
        of_products, of_operators = (
            is_again * (num / max(of, 1)) for num, of in zip(_nums(shared), _nums(way), strict=True)
        )
        self._count(way, 1, (of_products, of_operators))
        self._open[-1] = _Open(key, set(followed), (of_products, of_operators))

    def ended(self, results: Iterable[Any]) -> None:
        one = self._open.pop() if self._open else None
        if one is not None:
            graph = graph_of(results)
            self._made[one.key].append(({*graph.followed, *graph.sums} - one.before, one.parts_again))

    def end_step(self) -> None:
        made = set[Any]().union(*(one for of_key in self._made.values() for one, _ in of_key))
        totals = [of + num for of, num in zip(self._total, _nums(self._seen - made), strict=True)]
        if self._num and any(totals):
            parts = (again / max(of, 1) for again, of in zip(self._again, totals, strict=True))
            self._steps.append((*parts, self._num, self._num_again))
        self._asked, self._open, self._seen = {}, [], set()
        self._made.clear()
        self._again, self._total = [*NONE], [0, 0]
        self._num, self._num_again = 0, 0.0

    def found(self) -> DerivativeCalls | None:
        """Of the step in the middle, with the line of most calls for one more input; None without calls."""
        if not self._steps:
            return None
        of_products, of_operators, num, again = (
            median(map(float, column)) for column in zip(*self._steps, strict=True)
        )
        return DerivativeCalls(
            num=round(num),
            num_again=round(again),
            of_products=of_products,
            of_operators=of_operators,
            at=max(self._at, key=lambda line: float(self._at[line])),
        )

    def _count(self, operators: set[Any], times: int, parts_again: _Parts = NONE) -> None:
        self._seen |= operators
        of_made = [[(_nums(operators & one), parts) for one, parts in some] for some in self._made.values()]
        for kind, (num, part) in enumerate(zip(_nums(operators), parts_again, strict=True)):
            self._total[kind] += times * num
            again = times * part * num
            for some in of_made:  # of one graph that a pass goes through there is none less
                known = [(nums[kind], parts[kind]) for nums, parts in some if nums[kind]]
                again = again + (1 - part) * times * sum(one * more for more, one in known[1:])
            self._again[kind] = self._again[kind] + again


def _way_to(nodes: list[Any], followed: dict[Any, list[Any]]) -> set[Any]:
    """What lies between the beginning and these."""
    left = [one for one in nodes if one in followed]
    way = set(left)
    while left:
        new = {*followed[left.pop()]} - way
        way |= new
        left += new
    return way.difference(nodes)


def _are_alike(asked: _Asked, before: list[_Asked]) -> Any:
    """1 where one call could be asked for all: none asks for what one before it did, and all begin with the
    same gradients of outputs, as ones are. A device compares them when it comes to that."""
    if any(asked.inputs & one.inputs for one in before):
        return 0.0
    alike: Any = 1.0
    for one, other in zip(asked.given, before[0].given, strict=True):
        if one is other:
            continue
        devices = backend_of(one.device)
        if one.shape != other.shape or (devices.is_device and devices.is_capturing()):
            return 0.0
        alike = alike * (one.detach() == other.detach()).all()
    return alike
