"""What lies between a model and its loss: loops over operators, operators that go through the weights
themselves instead of activations, such as a penalty on each, and those that hand large tensors to each other;
and what they take."""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Set
from statistics import median
from typing import Any, NamedTuple

import torch

from aorta.attach.backward_graphs import ACCUMULATE, MOST_ENDS, MOST_NODES
from aorta.records.schema import LossLoop

LOOP = 32
"""Operators of one name between a model and its loss, from which on a loop called them."""
LARGE_BYTES = 8e6
"""Of weights, that a penalty moves in a step: less stays in caches."""
VIEWS = ("View", "Permute", "TBackward", "Transpose", "Expand", "Alias", "squeeze", "Squeeze", "Detach")
PRODUCTS = ("mm", "Mm", "Linear", "Matmul", "Dot", "Mv")
OF_ROWS = ("Embedding", "Index", "Gather", "Select", "Slice", "Split", "Conv")
"""In names of operators: views move nothing, and those of a part of a tensor are left out."""
JOINED = (
    *(
        "Mul",
        "Add",
        "Sub",
        "Rsub",
        "Div",
        "Pow",
        "Exp",
        "Log",
        "Softmax",
        "Sigmoid",
        "Tanh",
        "Neg",
        "Abs",
        "Clamp",
    ),
    *("Sum", "Mean", "Sqrt", "Where", "Relu", "Softplus", "Norm", "Mse", "L1", "Huber", "KlDiv", "Entropy"),
    *("Nll", "Copy", "Clone", "Max", "Min", "Masked"),
)
"""In names of operators that take as long as their bytes, and could be one function."""
MOVES = ("Index", "Gather", "Select", "Slice", "Split", "Cat", "Stack", "Repeat")
"""The same of what takes as long, and stays."""
ONE_FUNCTION = 8
"""Times that one goes through the largest tensor in both passes, as cross_entropy does."""
FLOPS_PER_BYTE = 8
"""Of a CPU's core: what it multiplies while a byte passes through its memory."""
ADDED = 3
"""Times that a gradient goes through memory where it is added to the one of the model's own."""


class _Between(NamedTuple):
    """Operators of a graph before the model's are reached; bytes that they move in both passes, of all and of
    those that are called with nothing but weights; parameters that these go through; and of such bytes, what
    is left where one function does it all: as many where it cannot."""

    names: Counter[str]
    num_bytes: float = 0.0
    weights_bytes: float = 0.0
    num_parameters: int = 0
    least_bytes: float = 0.0


class LossLoops:
    """What is between a model and its loss, forward and backward, in a few steps: of a model on a CPU by the
    host's clock."""

    def __init__(self) -> None:
        self._ends = deque[Any](maxlen=MOST_ENDS)
        """Where gradients come to the model, in the open step."""
        self._inside: list[range] = []
        """Numbers of the nodes that the calls of the open step made."""
        self._is_on_cpu = False
        self._left_ns = 0
        self._passes: list[tuple[_Between, list[float]]] = []
        """In the open step; of a model on a CPU with ms, once they have come to it."""
        self._found: list[tuple[list[_Between], float | None]] = []
        """By step."""

    def model_returns(self, outputs: Iterable[torch.Tensor], first: int) -> None:
        """first: number of the first node that the call made."""
        made = [one for one in outputs if one.grad_fn is not None]
        self._ends += [one.grad_fn for one in made]
        self._inside.append(range(first, torch.autograd._get_sequence_nr()))  # type: ignore[attr-defined]
        self._is_on_cpu = any(one.device.type == "cpu" for one in made)
        self._left_ns = time.monotonic_ns()

    def backward_begins(self, roots: Iterable[Any], trained: Set[int], forward_ended_ns: int) -> None:
        """trained: ids of the optimizers' parameters."""
        forward_ns, ends = forward_ended_ns - self._left_ns, {*self._ends}
        self._ends.clear()
        between = _between(roots, ends, self._inside, trained) if ends else None
        if between is None:
            return
        began_ns, handles, ms = time.monotonic_ns(), list[Any](), list[float]()
        self._passes.append((between, ms))

        def reached(_: Any) -> None:
            if handles:
                ms.append((forward_ns + time.monotonic_ns() - began_ns) / 1e6)
            while handles:
                handles.pop().remove()

        handles += [end.register_prehook(reached) for end in (ends if self._is_on_cpu else ())]

    def end_step(self) -> None:
        """Let go of what no backward pass came to."""
        if self._passes:
            times = [each for _, ms in self._passes for each in ms]
            is_timed = len(times) == len(self._passes)
            self._found.append(([one for one, _ in self._passes], sum(times) if is_timed else None))
        self._passes.clear()
        self._ends.clear()
        self._inside.clear()

    def found(self) -> LossLoop | None:
        if not self._found:
            return None
        (passes, _), times = self._found[-1], [ms for _, ms in self._found if ms is not None]
        return LossLoop(
            operators=sum(one.names.total() for one in passes),
            ms=median(times) if times else None,
            bytes=sum(one.num_bytes for one in passes),
            weights_bytes=sum(one.weights_bytes for one in passes),
            parameters=max(one.num_parameters for one in passes),
            least_bytes=sum(one.least_bytes for one in passes),
        )


def _between(roots: Iterable[Any], ends: Set[Any], inside: list[range], trained: Set[int]) -> _Between | None:
    """None where no loop called them, they move little of the weights and hand little on, or no end is
    reached."""
    left = [one.grad_fn for one in roots if getattr(one, "grad_fn", None) is not None]
    seen, is_reached, nodes = set(left), False, []
    while left and len(seen) < MOST_NODES:
        node = left.pop()
        number = node._sequence_nr()
        if node in ends or any(number in one for one in inside):
            is_reached |= node in ends
            continue
        if node.name() != ACCUMULATE:
            nodes.append((number, node))
            new = {following for following, _ in node.next_functions if following is not None} - seen
            seen |= new
            left += new
    if not is_reached or left:
        return None
    names = Counter(node.name() for _, node in nodes)
    between = _with_bytes(
        _Between(names), [node for _, node in sorted(nodes, key=lambda one: one[0])], trained
    )
    if max(names.values(), default=0) >= LOOP or between.weights_bytes >= LARGE_BYTES:
        return between._replace(least_bytes=0.0)
    is_handed = between.num_bytes >= max(LARGE_BYTES, 2 * between.least_bytes)
    return between if is_handed else None


def _with_bytes(between: _Between, nodes: list[Any], trained: Set[int]) -> _Between:
    """nodes: in the order of their calls."""
    of_weights: dict[Any, float] = {}
    """Bytes of what each gives, where it is called with weights, or what is computed of them, alone."""
    total = of_all = others = largest = 0.0
    added: dict[int, float] = {}
    for node in nodes:
        name, made = node.name(), _bytes_of(node)
        given, own, num_unknown = [], [], 0
        parameters = {}
        for one, place in node.next_functions:
            variable = getattr(one, "variable", None)
            if variable is not None and id(variable) in trained:
                parameters[id(variable)] = _size(variable)
            of_it = of_weights.get(one) if variable is None else parameters.get(id(variable))
            own += [] if of_it is None else [of_it]
            num_unknown += one is None
            given.append(_bytes_of(one, place) if of_it is None and one is not None else of_it or 0.0)
        is_product = any(part in name for part in PRODUCTS)
        # A tensor of the program's own that has no gradient may be of the weights' shape, or a number.
        is_own = bool(own) and len(own) == len(given) - (0 if is_product else num_unknown)
        is_own &= not any(part in name for part in OF_ROWS) and (is_product or made <= max(own, default=0.0))
        moved = 0.0 if any(part in name for part in VIEWS) else 3 * sum(given) + 2 * made
        if is_product and moved and len(given) > 1:  # of two matrices in fp32, and of their gradients
            moved += 3 * 2 * math.sqrt(math.prod(sorted(given)[-2:]) * made / 4**3) / FLOPS_PER_BYTE
        of_all, largest = of_all + moved, max(largest, made)
        is_joined = not is_product and any(part in name for part in JOINED)
        others += (
            0.0
            if is_joined
            else moved
            if is_product or name.startswith(MOVES)
            else math.inf
            if moved
            else 0.0
        )
        if is_own:
            of_weights[node] = made
            total += moved
            added |= parameters
    return between._replace(
        num_bytes=of_all,
        weights_bytes=total + ADDED * sum(added.values()),
        num_parameters=len(added),
        least_bytes=ONE_FUNCTION * largest + others,
    )


def _bytes_of(node: Any, place: int = 0) -> float:
    """Of a result of an operator."""
    form = node._input_metadata[place]
    return float(math.prod(form.shape) * form.dtype.itemsize)


def _size(variable: Any) -> float:
    """Bytes; of a DTensor those of this rank."""
    local = getattr(variable, "_local_tensor", variable)
    return float(local.numel() * local.element_size())
