"""Calls of torch.autograd.grad, in a few steps, that go through a graph again for one more input of it: u by
x, and then u by t. One call for both goes through it once, and what it makes later passes go through once.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, NamedTuple

import torch

from aorta.attach.layout_copies import line_of
from aorta.device.backend import backend_of
from aorta.records.libraries import program_frame
from aorta.records.stacks import StackFrame

MOST_NODES = 20_000
VIEWS = re.compile(
    "View|Split|^TBackward|Transpose|Permute|Expand|Alias|squeeze|Slice|Select|Detach|Accumulate"
)
"""In names of operators that compute nothing."""


def num_operators(operators: set[Any]) -> int:
    """Beside views."""
    return sum(VIEWS.search(one.name()) is None for one in operators)


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
    part_again: Any
    """Of it, that a call before it had; a tensor, where a device compares."""


class Derivatives:
    """By a number of operators: of products, which may take all the time, or of all, where each is alike."""

    def __init__(self, num_of: Callable[[set[Any]], int]) -> None:
        self._num_of = num_of
        self._asked: dict[Any, list[_Asked]] = {}
        """By outputs, in the open step, as all that follows."""
        self._open: list[_Open | None] = []
        self._made: dict[Any, list[tuple[set[Any], Any]]] = defaultdict(list)
        """By outputs, graphs that calls made, with their part_again."""
        self._seen: set[Any] = set()
        self._again: Any = 0.0
        self._total = self._num = 0
        self._num_again: Any = 0.0
        self._at: dict[StackFrame | None, Any] = defaultdict(float)
        self._steps: list[tuple[Any, int, Any]] = []
        """Part that is done again, calls, and those for one more input, of each step."""

    def begins(self, roots: Iterable[Any], given: Iterable[Any], inputs: Iterable[Any], adds: bool) -> None:
        """A pass does. adds: to gradients of parameters; else it is a call of grad() for these inputs."""
        self._open.append(None)
        roots = [*roots]
        followed = _followed(roots)
        if adds:
            self._count(set(followed), 2)
            return
        edges = [torch.autograd.graph.get_gradient_edge(one) for one in inputs]
        way = _way_to([one.node for one in edges], followed)
        asked = _Asked({(one.node, one.output_nr) for one in edges}, tuple(given), way)
        key = tuple((one.grad_fn, one.output_nr) for one in roots)
        before = self._asked.setdefault(key, [])
        shared = way.intersection(*[set[Any]().union(*(one.way for one in before))])
        is_again = _are_alike(asked, before) if shared else 0.0
        before.append(asked)
        frame = program_frame()
        self._at[None if frame is None else line_of(frame)] += is_again
        self._num, self._num_again = self._num + 1, self._num_again + is_again
        part = is_again * (self._num_of(shared) / max(self._num_of(way), 1))
        self._count(way, 1, part)
        self._open[-1] = _Open(key, set(followed), part)

    def ended(self, results: Iterable[Any]) -> None:
        one = self._open.pop() if self._open else None
        if one is not None:
            made = _followed([result for result in results if result is not None])
            self._made[one.key].append((set(made) - one.before, one.part_again))

    def end_step(self) -> None:
        made = set[Any]().union(*(one for of_key in self._made.values() for one, _ in of_key))
        total = self._total + self._num_of(self._seen - made)
        if self._num and total:
            self._steps.append((self._again / total, self._num, self._num_again))
        self._asked, self._open, self._seen = {}, [], set()
        self._made.clear()
        self._again = self._num_again = 0.0
        self._total = self._num = 0

    def found(self) -> tuple[float, int, int, StackFrame | None]:
        """Part of the passes of a step that is done again, calls, those for one more input, and the line of
        most of these: of the step in the middle."""
        if not self._steps:
            return 0.0, 0, 0, None
        part, num, again = (median(map(float, column)) for column in zip(*self._steps, strict=True))
        return part, round(num), round(again), max(self._at, key=lambda line: float(self._at[line]))

    def _count(self, operators: set[Any], times: int, part_again: Any = 0.0) -> None:
        num = self._num_of(operators)
        self._total += times * num
        self._seen |= operators
        self._again = self._again + times * part_again * num
        for of_key in self._made.values():  # of one graph that a pass goes through there is none less
            nums = [(self._num_of(operators & made), part) for made, part in of_key]
            again = sum(part * num for num, part in [one for one in nums if one[0]][1:])
            self._again = self._again + (1 - part_again) * times * again


def _followed(roots: Iterable[Any]) -> dict[Any, list[Any]]:
    """Operators, and what sums gradients of leaves, with those that take what they give; none of a graph that
    is too large."""
    left = [one.grad_fn for one in roots if one.grad_fn is not None]
    followed: dict[Any, list[Any]] = {one: [] for one in left}
    while left and len(followed) < MOST_NODES:
        node = left.pop()
        for before, _ in node.next_functions:
            if before is None:
                continue
            if before not in followed:
                followed[before] = []
                left.append(before)
            followed[before].append(node)
    return {} if left else followed


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
