"""Takes fingerprints in checked steps: of collectives before and after, of gradients and parameters
around the optimizer's step. They are read once, behind the window."""

import operator
import os
import sys
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import reduce, wraps
from itertools import islice
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from aorta.check.fingerprints import Prints, fingerprints, numbers
from aorta.check.names import Named
from aorta.check.operators import PLAIN, Issued
from aorta.hazards.numbers import Call, Difference, Moment, Numbered, Parameter
from aorta.record.interception.replaced import uncompiled

OPS = {
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather", "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter", "broadcast_": "broadcast",
}  # fmt: skip
"""Operations whose arithmetic is known, by their operator."""
F = TypeVar("F", bound=Callable[..., Any])
MAX_PARAMETERS = 2000
OPTIMIZER_FILE = os.path.join("torch", "optim", "optimizer.py")
MIN_NUMEL = 16
"""Smaller tensors are counters and flags, not data."""


_SKIPPED = reduce(
    operator.or_,
    (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
        for name in (
            "Python", "PythonTLSSnapshot", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU",
            "AutocastCUDA",
        )
    ),
)  # fmt: skip
"""Modes of the dispatcher, autograd and autocast, by one guard: contexts of their own cost as much as a
kernel."""


def _unseen(method: F) -> F:
    """Return a method whose own operators and memory nothing sees: they are not the program's."""

    @wraps(method)
    def unseen(numbering: "Numbering", *args: Any) -> Any:
        order = numbering.order
        if order is not None and (numbering.is_short or torch.cuda.is_current_stream_capturing()):
            return None
        try:
            with (
                torch._C._ExcludeDispatchKeyGuard(_SKIPPED),
                nullcontext() if order is None else order.aside(),
            ):
                return method(numbering, *args)
        except torch.OutOfMemoryError:
            numbering.run_short()
            return None

    return unseen  # type: ignore[return-value]


class _Pending:
    """A call whose output is not known yet."""

    __slots__ = ("call", "inputs", "outputs", "prints")

    def __init__(self, call: Call, inputs: Prints, outputs: list[Tensor]) -> None:
        self.call = call
        self.inputs = inputs
        self.outputs = outputs
        self.prints: Prints | None = None


class Numbering:
    """Fingerprints of one process; `take` gives them and begins anew."""

    def __init__(self, site_text: Callable[[int], str]) -> None:
        self._site_text = site_text
        self.order: Any = None
        """Of the device, which is told what is not the program's."""
        self.step = 0
        self._place = 0
        self._pending: list[_Pending] = []
        self._of_stream: dict[Hashable, _Pending] = {}
        self.promised_calls: list[_Pending] = []
        """Calls whose futures C++ waits for, unseen: behind the backward pass they have ended."""
        self._caller: Any = None
        """Stream on which it waits."""
        self._counts: dict[tuple[int, str], int] = {}
        self._parameters: list[tuple[int, list[tuple[int, int, int, Moment]], Prints]] = []
        """Step, then of each parameter its place, its id and number, and the moment."""
        self._names = dict[int, str]()
        self._hooks: list[Any] = []
        self.is_hooked = False
        self.is_on = False
        """In a window."""
        self.is_short = False
        """The device has too little memory left for fingerprints."""

    def hook_optimizers(self) -> None:
        """See the steps of all optimizers from now on; nothing while one goes through its hooks.

        A step begins and ends in such a hook, and torch raises where hooks are added or removed
        meanwhile. So they are added at the first operator outside of an optimizer's step, and stay."""
        if not self.is_hooked and not _in_optimizer():
            self.is_hooked = True
            self._hooks = [
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
            ]

    def unhook(self) -> None:
        """Take the hooks off, unless an optimizer goes through them now."""
        if not _in_optimizer():
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def take(self, rank: int) -> Numbered:
        """Fingerprints since the last take; none where the device has no memory to bring them together."""
        taken = Numbered(rank=rank)
        calls, of_optimizers = self._pending, self._parameters
        self._pending, self._parameters, self._place = [], [], 0
        self._of_stream.clear()
        self.promised_calls.clear()
        self._counts.clear()
        both = [(pending.inputs, pending.prints) for pending in calls]
        prints = [one for of_call in both for one in of_call if one is not None]
        try:
            values = iter(numbers([*prints, *(rows for _, _, rows in of_optimizers)]))
        except torch.OutOfMemoryError:
            self.is_short = True
            return taken
        for pending in calls:
            pending.call.inputs = list(islice(values, len(pending.inputs.sums)))
            if pending.prints is not None:
                pending.call.outputs = list(islice(values, len(pending.prints.sums)))
            taken.calls.append(pending.call)
        for step, parameters, _ in of_optimizers:
            for place, known, number, moment in parameters:
                name = self._names.get(known) or f"parameter {number}"
                taken.parameters.append(
                    Parameter(step=step, place=place, name=name, moment=moment, numbers=next(values))
                )
        return taken

    def run_short(self) -> None:
        """Take no more fingerprints in this window, and keep nothing of the program's for them."""
        self.is_short = True
        for pending in self._pending:
            pending.outputs = []

    # -- collectives ---------------------------------------------------------------------------

    @_unseen
    def called(self, issued: Issued) -> Any:
        """Fingerprint a collective's inputs, before it is issued; None where there is nothing to compare."""
        op, values = OPS.get(issued.name.partition("::")[2]), issued.values
        group = _group(values)
        if op is None or group is None or dist.get_world_size(group) < 2:
            return None
        ranks = dist.get_process_group_ranks(group)
        inputs, outputs = _sides(op, issued)
        if not inputs or any(t.numel() < MIN_NUMEL or not t.is_floating_point() for t in inputs):
            return None
        name = ",".join(map(str, ranks))
        number = self._counts[self.step, name] = self._counts.get((self.step, name), -1) + 1
        self._place += 1
        call = Call(
            step=self.step,
            group=name,
            number=number,
            place=self._place,
            op=op,
            reduction=_reduction(values) if op in ("all_reduce", "reduce_scatter") else "",
            name=self._site_text(issued.site),
            epsilon=torch.finfo(inputs[0].dtype).eps,
            root=values.get("root_rank"),
        )
        num = len(ranks) if op == "reduce_scatter" else 1
        pending = _Pending(call, _of_parts(inputs, num), outputs)
        self._pending.append(pending)
        return pending

    def issued(self, pending: Any, stream: Hashable, result: Any, is_async: bool) -> None:
        """Fingerprint the outputs of a call that has ended; remember one that has not, by its stream."""
        if not pending.outputs and isinstance(result, Tensor):
            pending.outputs = [result]
        if is_async:
            self._of_stream[stream] = pending
        else:
            self._print(pending)

    def waited(self, stream: Hashable) -> None:
        """Fingerprint the outputs of the call with this stream: the caller waits for it now."""
        pending = self._of_stream.pop(stream, None)
        if pending is not None:
            self._print(pending)

    def promised(self, stream: Hashable, to_cpp: bool) -> None:
        """Note that somebody took the future of the call with this stream. In Python callbacks follow, on any
        thread, which may change what comes out (PowerSGD's do): nothing is compared then."""
        pending = self._of_stream.pop(stream, None)
        if pending is not None and to_cpp:
            self.promise(pending)

    def promise(self, pending: Any) -> None:
        """Note a call of a backward pass that C++ waits for in the end, on the stream of who called it."""
        if self.order is not None and not self.promised_calls:
            self._caller = None
            if torch._C._current_graph_task_id() != -1:
                torch.autograd.Variable._execution_engine.queue_callback(self._note_caller)
        self.promised_calls.append(pending)

    def _note_caller(self) -> None:
        self._caller = torch.cuda.current_stream()

    def settle(self) -> None:
        """Fingerprint the outputs of calls that C++ has waited for, now that no backward pass runs: what
        follows may change them, as clipping does where gradients are views of buckets. What follows may
        be on another stream, which did not wait for them."""
        if self.promised_calls and torch._C._current_graph_task_id() == -1:
            if self.order is None or self._caller is not None:
                with nullcontext() if self._caller is None else torch.cuda.stream(self._caller):
                    for pending in self.promised_calls:
                        self._print(pending)
            self.promised_calls.clear()

    @_unseen
    def _print(self, pending: _Pending) -> None:
        if pending.outputs:
            num = 1 if pending.call.op != "all_gather" else pending.call.group.count(",") + 1
            pending.prints = _of_parts(pending.outputs, num)
        pending.outputs = []

    # -- parameters ----------------------------------------------------------------------------

    @uncompiled
    def _before_optimizer(self, optimizer: Any, *_: Any) -> None:
        self.settle()
        self._of_parameters(optimizer, ("before", "gradient"))

    @uncompiled
    def _after_optimizer(self, optimizer: Any, *_: Any) -> None:
        self._of_parameters(optimizer, ("after",))

    def _of_parameters(self, optimizer: Any, moments: tuple[Moment, ...]) -> None:
        if self.is_on:
            self._print_parameters(optimizer, moments)

    @_unseen
    def _print_parameters(self, optimizer: Any, moments: tuple[Moment, ...]) -> None:
        if not self._names:
            self._names = {id(parameter): name for name, parameter in Named().parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        of_device: dict[int, tuple[list[tuple[int, int, int, Moment]], list[Tensor]]] = {}
        for moment in moments:
            for number, parameter in enumerate(parameters[:MAX_PARAMETERS]):
                tensor = parameter.grad if moment == "gradient" else parameter
                if type(tensor) not in PLAIN or tensor.is_sparse:
                    continue  # of a sharded one every rank has a part of its own
                self._place += 1
                known, tensors = of_device.setdefault(tensor.get_device(), ([], []))
                known.append((self._place, id(parameter), number, moment))
                tensors.append(tensor)
        for known, tensors in of_device.values():
            self._parameters.append((self.step, known, fingerprints(tensors)))


def _in_optimizer() -> bool:
    """True within an optimizer's step, or a hook of one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(OPTIMIZER_FILE):
            return True
        frame = frame.f_back
    return False


def _group(values: dict[str, Any]) -> Any:
    boxed, name = values.get("process_group"), values.get("group_name")
    if boxed is not None:
        return dist.ProcessGroup.unbox(boxed)
    return None if name is None else torch._C._distributed_c10d._resolve_process_group(name)


def _reduction(values: dict[str, Any]) -> str:
    op = values.get("reduce_op")
    if isinstance(op, str):
        return op.lower()
    try:
        kind = dist.ReduceOp.RedOpType(op._get_method("op")())  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        return ""
    return str(kind.name).lower()


def _sides(op: str, issued: Issued) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and outputs of a call; none where it has several that are reduced apart."""
    inputs, outputs = ([t for t, _ in side if t is not None] for side in (issued.reads, issued.writes))
    if op not in ("all_reduce", "broadcast"):
        return inputs, outputs
    both = inputs + outputs
    if len(both) != 1:
        return [], []
    return both, both if "tensors" in issued.values else []


def _of_parts(tensors: list[Tensor], num: int) -> Prints:
    """Fingerprints of what ranks send or get: tensors, or one that holds a part for each of num ranks."""
    is_one = len(tensors) == 1 and not tensors[0].numel() % num
    return fingerprints(tensors, num if is_one else 1)


class FirstBad:
    """Looks for the first operation whose result is not finite: it waits for the device after each."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.difference: Difference | None = None

    def look(self, issued: Issued, site: str, step: int) -> None:
        written = {access[0] for _, access in issued.writes}
        if any(_is_bad(tensor) for tensor, access in issued.reads if access[0] not in written):
            detail = "the first operation that reads a value that is not finite; no checked one made it"
        elif any(_is_bad(tensor) for tensor, _ in issued.writes):
            detail = "the first operation with a result that is not finite"
        else:
            return
        self.difference = Difference(
            rank=self._rank, step=step, place=0, what="nan", name=site, detail=detail
        )


def _is_bad(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
