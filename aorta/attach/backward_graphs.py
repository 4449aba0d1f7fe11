"""What the graphs of backward passes tell, in a few steps: operators that several passes of a step go
through, as one pass of the sum of their losses would not; and how much of a model's outputs the loss takes.

Passes are not one where gradients were set back or an optimizer stepped in between, or one keeps its graph.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from aorta.attach.call_flops import line_of_caller
from aorta.attach.discarded_gradients import Call, DiscardedGradients, is_set_back
from aorta.device.backend import backend_of
from aorta.records.stacks import StackFrame

MOST_NODES = 20_000
MOST_ENDS = 64
"""Outputs of models that are held in a step: each holds its graph."""
PRODUCTS = ("mm", "conv", "attention", "lstm", "gru", "rnn")
"""Parts of names of operators that take most of a backward pass."""
ACCUMULATE = "torch::autograd::AccumulateGrad"
LOOKED_AT = 8
"""Parameters, whose gradients tell whether they were set back."""
LOSS = "NllLossBackward0"
"""Of cross_entropy, too, on one row for each target."""
HAND_ON = (
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0", "CloneBackward0"),
    *("ToCopyBackward0", "LogSoftmaxBackward0"),
)
"""Operators that give a row where they take one."""
Output = tuple[int, int]
"""Id of a module, and place among its outputs."""


class BackwardGraphs:
    """Of a few steps."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        """Operators, in the open step; their graph is held as long."""
        self.reached: set[Any] = set()
        """The same, whatever was set back since."""
        self._written: list[tuple[Any, int]] = []
        """Parameters that an earlier pass of it gave gradients, and their versions."""
        self._again = self._num = 0
        self._at = Counter[StackFrame | None]()
        self._ends: dict[Any, Output] = {}
        """Where gradients come to the outputs of models, in the open step."""
        self._taken = defaultdict[Output, Any](float)
        """In the open step, by all its passes and calls."""
        self._parts = defaultdict[Output, list[Any]](list)
        self._counted = defaultdict[torch.Size, list[Any]](list)
        """Part of the targets that a loss counts, by the shape of what it is given."""
        self._calls: list[tuple[Any, Any]] = []
        """One output of each call of a model in the open step, and the kind of the call in the first one."""
        self.discarded = DiscardedGradients()
        self.num_calls = Counter[Any]()
        """By kind, calls of the first step that one backward pass goes through."""
        self._zeroed = 0
        """Bytes of gradients of the open step that were set to zero, to be added to."""
        self._zeroed_of_steps: list[int] = []

    def model_returns(self, module: Any, outputs: Iterable[torch.Tensor], kind: Any = None) -> None:
        """kind: of the call, in the first step."""
        for place, one in enumerate(outputs):
            if one.grad_fn is not None and len(self._ends) < MOST_ENDS:
                if kind is not None and place == 0:
                    self._calls.append((one.grad_fn, kind))
                self._ends[one.grad_fn] = id(module), place

    def backward_begins(self, graph: "Graph", adds: bool, optimizer_of: Mapping[int, int]) -> None:
        """adds: to the gradients of parameters, without a graph of its own. optimizer_of: id, by that of a
        parameter."""
        followed, leaves = graph.followed, graph.leaves
        operators = set(followed)
        self.reached |= operators
        if not adds:
            return
        line = line_of_caller()
        calls = [Call(number, kind) for number, (end, kind) in enumerate(self._calls) if end in operators]
        self.discarded.backward_begins(leaves, optimizer_of, calls, line)
        for kind, num in Counter(call.kind for call in calls).items():
            self.num_calls[kind] = max(self.num_calls[kind], num)
        held = [one for one in leaves if one.grad is not None]
        if held and all(map(is_set_back, held[:: -(-len(held) // LOOKED_AT)])):
            self._zeroed += sum(one.grad.nbytes for one in held)
        if any(one._version != version or is_set_back(one) for one, version in self._written):
            self._seen, self._written = set(), []
        again = num_products(operators & self._seen)
        self._again, self._num = self._again + again, self._num + num_products(operators - self._seen)
        if again:
            self._at[line] += again
        self._seen |= operators
        self._written += [(one, one._version) for one in leaves[:LOOKED_AT]]
        for loss in (one for one in followed if one.name() == LOSS):
            shape = getattr(_saved(loss, "self"), "shape", None)
            part = _part_counted(loss)
            if shape is not None and part is not None:
                self._counted[shape].append(part)
        for end, output in self._ends.items():
            if end in operators:
                self._taken[output] = self._taken[output] + _part_taken(end, followed)

    def optimizer_stepped(self, optimizer: int | None) -> None:
        """optimizer: its id; None where it is not known which."""
        self._seen, self._written = set(), []
        self.discarded.optimizer_stepped(optimizer)

    def end_step(self) -> None:
        for output, part in self._taken.items():
            self._parts[output].append(part)
        self._taken.clear()
        self._zeroed_of_steps.append(self._zeroed)
        self._zeroed = 0
        self._seen, self.reached, self._written, self._ends, self._calls = set(), set(), [], {}, []
        self.discarded.end_step()

    def repeats(self) -> tuple[float, StackFrame | None]:
        """How often more the operators of a step are gone through than once, and the line of most of it."""
        return self._again / max(self._num, 1), max(self._at, key=self._at.__getitem__, default=None)

    def zeroed_bytes(self) -> int:
        """Of a step, in the one with least."""
        return min(self._zeroed_of_steps, default=0)

    def parts_taken(self) -> dict[Output, float]:
        """Of the entries of an output, in the step that takes most."""
        return {output: min(max(map(float, parts)), 1.0) for output, parts in self._parts.items()}

    def parts_counted(self) -> dict[torch.Size, float]:
        """Of the targets of losses, in the step that counts most."""
        return {shape: max(map(float, parts)) for shape, parts in self._counted.items()}


def num_products(operators: set[Any]) -> int:
    return sum(any(part in one.name().lower() for part in PRODUCTS) for one in operators)


class Graph(NamedTuple):
    followed: dict[Any, list[Any]]
    """Operators, with those that take what they give."""
    sums: dict[Any, list[Any]]
    """The same of what adds to gradients of parameters."""
    leaves: list[Any]
    """These parameters, each as often as an operator reads it."""


def graph_of(roots: Iterable[Any]) -> Graph:
    """What a backward pass from these tensors can go through; nothing of a graph that is too large."""
    left = [one.grad_fn for one in roots if getattr(one, "grad_fn", None) is not None]
    graph = Graph({one: [] for one in left}, defaultdict(list), [])
    while left and len(graph.followed) < MOST_NODES:
        node = left.pop()
        for before, _ in node.next_functions:
            if before is None:
                continue
            if before.name() == ACCUMULATE:
                graph.leaves.append(before.variable)
                graph.sums[before].append(node)
                continue
            if before not in graph.followed:
                graph.followed[before] = []
                left.append(before)
            graph.followed[before].append(node)
    return Graph({}, {}, []) if left else graph


def _part_taken(node: Any, followed: dict[Any, list[Any]]) -> Any:
    """Of the entries that an operator gives, by those that choose some; a tensor where a mask tells."""
    total: Any = 0.0
    for one in followed[node]:
        part = _part_chosen(one)
        # Of a row whose probabilities add up to 1 all is taken, if any of it.
        if part is None or (node.name() == "LogSoftmaxBackward0" and one.name() not in (LOSS, *HAND_ON)):
            return 1.0
        total = total + part * _part_taken(one, followed)
    return total if followed[node] else 1.0


def _part_chosen(node: Any) -> Any:
    """None of an operator that takes all."""
    name = node.name()
    if name in HAND_ON:
        return 1.0
    if name == LOSS:
        return _part_counted(node)
    if name not in ("SelectBackward0", "SliceBackward0", "IndexBackward0"):
        return None
    sizes = node._saved_self_sym_sizes
    if name == "IndexBackward0":
        masks = [one for one in node._saved_indices if one is not None]
        is_mask = len(masks) == 1 and masks[0].dtype == torch.bool and type(masks[0]) is torch.Tensor
        return masks[0].float().mean() if is_mask else None
    size = sizes[node._saved_dim]
    if name == "SelectBackward0":
        return 1 / size
    start, end = _signed(node._saved_start), _signed(node._saved_end)
    end = size if end < 0 and node._saved_end >= 2**64 - 1 else end
    return len(range(*slice(start, end, node._saved_step).indices(size))) / size


def _part_counted(loss: Any) -> Any:
    """Of a loss's targets, those that are none to be ignored; None where they are not known. They stay on
    their device until the end."""
    target = _saved(loss, "target")
    if type(target) is not torch.Tensor or target.dim() != 1:
        return None
    devices = backend_of(target.device)
    if devices.is_device and devices.is_capturing():
        return None
    return (target != _signed(loss._saved_ignore_index)).float().mean()


def _signed(number: int) -> int:
    """Nodes give their negative numbers as unsigned ones of 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def _saved(node: Any, name: str) -> Any:
    """What an operator keeps for its backward pass, where that needs no hook of the program's: of what
    checkpoint() left out a hook would call the model once more."""
    saved = getattr(node, f"_raw_saved_{name}")
    return saved.data if getattr(saved, "unpack_hook", saved) is None else None
