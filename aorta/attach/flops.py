"""Model FLOPs of a step, counted by torch on a copy of the model that holds no data.

    an early step   the outermost module of each call is noted, with the shapes of what it was called with
    the end         copies on the meta device go forward and backward, counted by torch's formulas

While that step runs, Module.__call__ is replaced, or where something is compiled the calls of what is around
it (compiled_modules.py), and nothing is when it has ended. A copy shares no tensor, no hook and no random
number with the model. What cannot be counted has no number and a reason: values that the model reads,
collectives in its forward pass, operators without a formula. Experts count as evenly used.
Of a model that is parallel by tensors the whole is counted, and divided by the ranks that share it.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from operator import mul
from traceback import walk_tb
from typing import Any, NamedTuple
from weakref import ref

import msgspec
import torch
from torch.nn import Module
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from aorta.attach.backward_graphs import BackwardGraphs, graph_of
from aorta.attach.call_flops import MOST_CPU_S, Count, count_of, line_of_caller, tensors_of
from aorta.attach.compiled_modules import (
    call_before_compiling,
    called_around,
    is_guarded,
    may_compile,
    replace_call,
)
from aorta.attach.derivatives import Derivatives
from aorta.attach.fourier_lengths import FourierLengths
from aorta.attach.layout_copies import LayoutCopies
from aorta.attach.loss_loops import LossLoops
from aorta.attach.meta_copies import (
    LEFT_OUT,
    NotCountedError,
    copy_without_data,
    form_of,
    held_by,
    num_ranks_sharing,
    without_data,
)
from aorta.attach.needless_batches import FrozenModules, NeedlessBatches, some_of, unwrapped
from aorta.attach.needless_operators import Table
from aorta.attach.program import ALIGNED, float32_matmul_precision
from aorta.record.collective_names import compiled_frames
from aorta.record.interception.replaced import left_uncompiled, uncompiled
from aorta.records.libraries import OWN, PYTHON, library_of
from aorta.records.schema import (
    COMPILED_PARTS,
    NO_CALL,
    NO_OPTIMIZER,
    UNLIKE,
    CallsOfFewRows,
    LineOfWork,
    LossLoop,
    OperatorLoop,
    WorkOfStep,
)
from aorta.records.stacks import StackFrame

MOST_KINDS = 8
"""Of calls with different modules or shapes in a step; a step with more has no number."""
SEEN_BEFORE = 0.05
"""Of the rows of the steps that were noted, which are few of those of an epoch."""
OF_CALLS = ("again", "fp32", "fp64", "unread", "inputs", "masked", "repeated", "repeated_bytes")
OF_SUMS = ("ordered_bytes", "indexed_bytes")
OF_OPERATORS = (
    *("scores_bytes", "grown_bytes", "unchanged", "unchanged_bytes", "one_hot", "one_hot_bytes"),
    *("zeros", "unused", "merged", "hoisted", "hoisted_bytes", "attention", "causal"),
    *("spread", "unfolded", "unfolded_bytes", "widened"),
)
"""Of NeedlessOperators, by line, as WorkOfStep calls them."""
MOST_LINES = 64
"""That run.json has of a model."""
ALIGNED_OF = {"bf16": ALIGNED, "fp16": ALIGNED, "tf32": ALIGNED // 2}
"""Elements of 16 bytes, of types for whose products a GPU has kernels of their own where rows begin there."""
WHOLE = 0.9
"""Of a call's work, from which on the line that calls is that of fp64 products, not lines within."""
ALIKE = 3
"""Steps one after the other in which the size of the model's input is noted; later ones follow half as far
again from the first, for batches that grow."""


class ModelCalls:
    """Notes which modules a step calls, and counts their FLOPs later."""

    def __init__(self) -> None:
        self._error = self._size_error = ""
        """Why there is no number of FLOPs, and none of the batch; what needs them is noted no more."""
        self._owner: type | None = None
        self._original: Callable[..., Any] | None = None
        self._call: Callable[..., Any] | None = None
        self._was_own = False
        self._kinds: dict[Any, tuple[Module, Any, Any]] = {}
        """Copies with what they were called with."""
        self._times: dict[Any, int] = {}
        self._lines: dict[Any, StackFrame | None] = {}
        """That make the calls."""
        self._cached: set[Any] = set()
        """Those within parametrize.cached()."""
        self._given: dict[tuple[int, int], list[Any]] = {}
        """By module and place among its calls of a step: the kind of the call in the first step, and what it
        was called with, where it was the same in each step that was noted since."""
        self._held: dict[int, list[Any]] = {}
        """By module: what it holds beside its parameters, in the first step."""
        self._fuses = True
        """torch may take a fused kernel for attention."""
        self._unread: dict[int, tuple[Any, torch.Tensor, torch.Tensor | None]] = {}
        """By id of a parameter that no optimizer has and that gets gradients: a reference, and some of its
        values in the first step and in the last one, which differ where somebody updates it all the same."""
        self._gradients: dict[int, tuple[Any, int]] = {}
        """Those that such parameters have before the first step's backward pass, and their versions."""
        self._copies: dict[int, Module] = {}
        self._models: dict[int, tuple[Any, bool]] = {}
        """Of each module that was called: a reference, and whether it holds what is trained."""
        self._sizes: list[dict[int, tuple[int, int, int]]] = []
        """Of each step so far, by module: rows, tokens and entries that it was called with."""
        self._first = self._next = 0
        """Numbers of the first step, and of the one from which on another is noted."""
        self.work: WorkOfStep | None = None
        """Found by count()."""
        self.precision: str | None = None
        """In which most of the work is done, by autocast and the parameters' type."""
        self._type: torch.dtype | None = None
        """Of the parameters, as they are multiplied where autocast is off."""
        self._cast = Counter[torch.dtype | None]()
        """Of the weights that the first step's modules multiply by: how many entries are cast to which type.
        A model may enter autocast itself, or be wrapped in it."""
        self._copied, self._of_loss = LayoutCopies(), LossLoops()
        self._transforms = FourierLengths()
        self._graphs = BackwardGraphs()
        self._derivatives = Derivatives()
        self._batches, self._frozen = NeedlessBatches(), FrozenModules()
        self._kinds_of_frozen: dict[int, tuple[Module, Any, Any]] = {}
        self._num_calls = Counter[int]()
        """In the open step, by module."""
        self._trained: dict[int, int] = {}
        """Id of the optimizer, by that of a parameter."""
        self._kind: Any = None
        """Of the newest call, in the first step."""
        self._num_sharing = 1
        """Ranks that share the work of one model."""
        self._depth = 0
        self._no_call = NO_CALL
        self._around: list[Any] | None = None
        """References to modules whose calls are noted in a program that compiles."""
        self._put_back: list[Callable[[], None]] = []
        self._is_cut = False
        """The open step's calls are noted no more."""
        self._matrices: set[int] = set()
        """Parameters that are trained there, of two dimensions or more."""

    def begin_step(self, optimizers: Iterable[Any], number: int) -> None:
        """Note the calls of modules that hold parameters of these, from now on, on this thread."""
        self._trained = {
            id(parameter): id(one)
            for one in optimizers
            for group in one.param_groups
            for parameter in group["params"]
        }
        if not self._trained or self._original is not None:
            return
        self._first = self._first if self._sizes else number
        self._sizes.append({})
        self._num_calls.clear()
        self._batches.begin_step(number)
        self._next = number + (1 if len(self._sizes) < ALIKE else max((number - self._first) // 2, 1))
        if self._around is None and (compiled_frames() > 0 or may_compile()):
            try:
                self._find_around(optimizers)
            except Exception as error:  # of any object of the program's
                self._around, self._size_error = [], _text_of(error)
                self._refuse(self._size_error)
        if self._around is not None:
            self._replace(sys.modules["torch._dynamo.eval_frame"].OptimizedModule)
            self._replace_around()
        else:
            self._replace(Module)
            self._put_back.append(call_before_compiling(self._compiling_begins))
            self._transforms.begin()
            if len(self._sizes) == 1:
                self._copied.begin()

    def end_step(self, is_whole: bool = True) -> None:
        """Put everything back. is_whole: False of a step that was cut short, whose size says nothing."""
        if self._original is None:
            return
        if not is_whole or self._is_cut:
            self._sizes[-1].clear()
        self._copied.end()
        self._transforms.end(is_whole)
        self._of_loss.end_step()
        self._batches.end_step(self._graphs.reached)
        self._graphs.end_step()
        with suppress(Exception):  # nothing is said of them
            self._derivatives.end_step()
            self._frozen.end_step()
            for one in (one for held in self._held.values() for one in held):
                one.end_step()
        is_first = len(self._sizes) == 1
        if is_first and self._type is not None:
            self.precision = _precision(self._type, self._cast)
        self._unread = {
            key: (held, first, None if is_first else some_of(one))
            for key, (held, first, _) in self._unread.items()
            if (one := held()) is not None and (not is_first or self._has_new_gradient(one))
        }
        self._put_call_back()
        self._original = self._call = None
        for put_back in self._put_back:
            put_back()
        self._put_back.clear()
        if is_first and self._is_cut:
            self._no_call = COMPILED_PARTS
            self._kinds.clear()
            self._copies.clear()
        self._is_cut = False
        if is_first and self._copies and self._matrices - _copied_parameters(self._copies.values()):
            self._refuse(COMPILED_PARTS)

    def backward_begins(
        self,
        roots: Iterable[Any],
        adds: bool,
        given: Iterable[Any] = (),
        makes_graph: bool = False,
        inputs: Iterable[Any] = (),
    ) -> None:
        """A backward pass begins at these tensors, with these gradients of them, in a step that is noted.
        adds: to gradients, of parameters where inputs are none; else it gives those of inputs."""
        forward_ended_ns = time.monotonic_ns()
        if self._original is not None:
            with suppress(Exception):
                graph = graph_of(roots)
                self._graphs.backward_begins(graph, adds and not makes_graph and not inputs, self._trained)
                self._derivatives.begins(graph, roots, given, inputs, adds)
        with suppress(Exception):  # last: it takes the time of what comes behind it
            self._of_loss.backward_begins(roots, self._trained.keys(), forward_ended_ns)

    def backward_ended(self, results: Iterable[Any]) -> None:
        """results: gradients that it gives."""
        with suppress(Exception):
            if self._original is not None:
                self._derivatives.ended(results)

    def optimizer_stepped(self, optimizer: Any) -> None:
        """In a step that is noted. optimizer: or what steps one."""
        is_known = id(optimizer) in self._trained.values()
        self._graphs.optimizer_stepped(id(optimizer) if is_known else None)

    @property
    def loss_loop(self) -> LossLoop | None:
        return self._of_loss.found()

    def _replace(self, owner: type) -> None:
        original: Callable[..., Any] = owner.__call__
        thread, calls = threading.get_ident(), self

        def call(self: Any, /, *args: Any, **named: Any) -> Any:
            # torch's profiler reads the local named self of each frame of Module.__call__, or crashes.
            if torch.compiler.is_compiling() or threading.get_ident() != thread:
                return original(self, *args, **named)
            return calls._called(self, partial(original, self), args, named)

        if owner is not Module:
            call.__code__ = call.__code__.replace()  # not that of what stands in for Module.__call__
            uncompiled(call)  # as the original is: compiled autograd calls what it compiles by it
        self._owner, self._original, self._call = owner, original, call
        self._was_own = "__call__" in vars(owner)
        owner.__call__ = call  # type: ignore[method-assign]

    def _put_call_back(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None and vars(owner).get("__call__") is self._call:
            if self._was_own:
                owner.__call__ = self._original  # type: ignore[assignment,method-assign]
            else:
                del owner.__call__

    def _compiling_begins(self, _: Any) -> None:
        """The program compiles for the first time: with Module.__call__ as it is, or it compiled anew."""
        with suppress(Exception):
            self._is_cut = True
            self._put_call_back()
            self._copied.end()
            self._transforms.end(is_whole=False)

    def _find_around(self, optimizers: Iterable[Any]) -> None:
        around, compiled = called_around()
        if compiled_frames() == 0 and not any(map(self._trains, compiled)):
            return  # a library may have asked for what is never called
        trained = (
            one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]
        )
        self._matrices = {id(parameter) for parameter in trained if parameter.dim() > 1}
        self._around = [ref(module) for module in around if self._trains(module)]
        self._no_call = COMPILED_PARTS

    def _replace_around(self) -> None:
        thread = threading.get_ident()

        def replacement(module: Module, original: Callable[..., Any], args: Any, named: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **named)
            return self._called(module, original, args, named)

        left_uncompiled(replacement, with_called=False)
        for held in self._around or ():
            if (module := held()) is not None and not is_guarded(module):
                self._put_back.append(replace_call(module, partial(replacement, module)))

    @partial(left_uncompiled, with_called=False)
    def _called(self, module: Module, original: Callable[..., Any], args: Any, named: Any) -> Any:
        if not self._is_noted(module, args, named):
            return original(*args, **named)
        self._depth += 1
        first = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        try:
            result = original(*args, **named)
        finally:
            self._depth -= 1
        self._returned(module, result, first)
        return result

    @left_uncompiled
    def _is_noted(self, module: Module, args: Any, named: Any) -> bool:
        if torch._C._is_tracing():  # it writes down what notes would ask of tensors too
            return False
        if self._depth:
            self._note_cast(module)
            return False
        # In a backward pass modules are called again, for what was not kept.
        if torch._C._current_graph_task_id() != -1 or _hands_on(module):
            return False
        note = self._note if torch.is_grad_enabled() else self._note_quiet
        return note(module, args, named)

    @left_uncompiled
    def _returned(self, module: Module, result: Any, first: int) -> None:
        with suppress(Exception):
            if torch.is_grad_enabled() and self._is_model(module):
                outputs = tensors_of(result)
                self._of_loss.model_returns(outputs, first)
                self._graphs.model_returns(module, outputs, self._kind)
                self._batches.returned(outputs)

    def _note(self, module: Module, args: Any, named: Any) -> bool:
        """True where it is one whose inner modules need not be noted."""
        if self._size_error:
            return True
        try:
            if not self._is_model(module):
                return len(self._sizes) == 1 and self._note_unread(module, args, named)
            leaves, structure = tree_flatten((args, named))
            size, before = _size(module, leaves), self._sizes[-1].get(id(module), (0, 0, 0))
            self._sizes[-1][id(module)] = size[0] + before[0], size[1] + before[1], size[2] + before[2]
        except Exception as error:
            self._size_error = _text_of(error)
            self._refuse(self._size_error)
            return True
        if not self._error:
            try:
                key = self._note_kind(module, leaves, structure) if len(self._sizes) == 1 else None
                self._kind = key
                self._note_given(module, leaves, key)
                with suppress(Exception):  # nothing is said of batches
                    self._batches.called(module, leaves, key, False, line_of_caller())
                    num_dims = 2 if size[1] else 3  # frames of sound, and the like
                    self._batches.is_table(next(one for one in leaves if getattr(one, "ndim", 0) == num_dims))
            except Exception as error:
                self._refuse(_text_of(error))
        return True

    def _note_cast(self, module: Module) -> None:
        """Note, in the first step, whether autocast is on where a module multiplies by its weight. The model
        itself counts where nothing in it does."""
        if len(self._sizes) > 1:
            return
        with suppress(Exception):
            weight = module._parameters.get("weight")
            size = 0
            if weight is not None and weight.ndim > 1 and not isinstance(module, torch.nn.Embedding):
                size = weight.numel()
            if size or not self._depth:
                device = next(module.parameters()).device.type
                on = torch.is_autocast_enabled(device)
                self._cast[torch.get_autocast_dtype(device) if on else None] += max(size, 1)

    def _note_quiet(self, module: Module, args: Any, named: Any) -> bool:
        """The same of a call without gradients."""
        with suppress(Exception):
            if not self._error and not self._size_error:
                if not self._is_model(module):
                    return self._note_frozen(module, args, named)
                self._batches.called(module, tree_flatten((args, named))[0], None, True, line_of_caller())
                return True
        return False

    def _note_frozen(self, module: Module, args: Any, named: Any) -> bool:
        """A module that trains nothing, and of which no parameter gets gradients."""
        leaves, structure = tree_flatten((args, named))
        if self._frozen.called(module, leaves, line_of_caller()):
            shapes = [without_data(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            kind = copy_without_data(module), *tree_unflatten(shapes, structure)
            self._kinds_of_frozen[id(module)] = kind
        return id(module) in self._kinds_of_frozen

    def _note_given(self, module: Module, leaves: list[Any], key: Any) -> None:
        """key: of the kind of call, in the first step."""
        place = id(module), self._num_calls[id(module)]
        self._num_calls[id(module)] += 1
        if key is not None:
            self._given[place] = [key, *map(_Same, leaves)]
        elif place in self._given:
            kind, *before = self._given[place]
            alike = [one.seen_again(leaf) for one, leaf in zip(before, leaves, strict=False)]
            self._given[place] = [kind, *alike]

    def _note_unread(self, module: Module, args: Any, named: Any) -> bool:
        """A module that holds nothing that is trained, and parameters with gradients all the same."""
        if self._error or not self._note_unread_of(module):
            return False
        try:
            self._note_kind(module, *tree_flatten((args, named)))
        except Exception:
            return False  # nothing is said of it
        return True

    def _note_unread_of(self, module: Module) -> bool:
        """Whether it has parameters that no optimizer has."""
        found = [one for one in module.parameters() if one.requires_grad and id(one) not in self._trained]
        self._unread |= {id(one): (ref(one), some_of(one), None) for one in found}
        grads = {id(one): one.grad for one in found if one.grad is not None}
        self._gradients |= {key: (ref(grad), grad._version) for key, grad in grads.items()}
        return bool(found)

    def _has_new_gradient(self, one: torch.Tensor) -> bool:
        """Not where it has the one that it had: what it gave was detached."""
        before, version = self._gradients.get(id(one), (lambda: None, 0))
        return one.grad is not None and (before() is not one.grad or one.grad._version != version)

    def _never_updated(self) -> set[int]:
        return {
            key
            for key, (_, first, last) in self._unread.items()
            if key not in self._trained and last is not None and torch.equal(first, last)
        }

    def _note_kind(self, module: Module, leaves: list[Any], structure: Any) -> Any:
        if id(module) not in self._copies:
            self._copies[id(module)] = copy_without_data(module)
            self._held[id(module)] = [_Same(one) for one in held_by(module)]
            self._fuses = self._fuses and _may_fuse_attention()
            self._note_unread_of(module)
        shapes: list[Any] = [
            without_data(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        for leaf, shape in zip(leaves, shapes, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf:
                shape.is_asked = id(leaf) not in self._trained
        key = id(module), str(structure), tuple(map(_shape_text, shapes))
        self._times[key] = self._times.get(key, 0) + 1
        self._lines.setdefault(key, line_of_caller())
        self._cached |= {key} if getattr(parametrize, "_cache_enabled", 0) else set()
        if self._is_model(module):
            self._type = self._type or _type_of(module)
            self._note_cast(module)
        if key not in self._kinds:
            if len(self._kinds) >= MOST_KINDS:
                raise NotCountedError(f"a step calls modules in more than {MOST_KINDS} different ways")
            self._kinds[key] = self._copies[id(module)], *tree_unflatten(shapes, structure)
        return key

    def _constant(self, key: Any, kind: tuple[Module, Any, Any]) -> list[torch.Tensor]:
        """What a copy holds or is called with, and is the same in all steps that were noted."""
        if len(self._sizes) < ALIKE:
            return []
        held = {one.number for one in self._held[key[0]] if one.is_there()}
        found = [one for one in held_by(kind[0]) if getattr(one, "copy_of", 0) in held]
        given = [alike for of, *alike in self._given.values() if of == key]
        leaves = tree_leaves(kind[1:])
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and all(
                len(alike) == len(leaves) and alike[place].times >= ALIKE - 1 for alike in given
            ):
                found.append(leaf)
        return found

    def _refuse(self, reason: str) -> None:
        """Count no FLOPs."""
        self._error = reason
        self._kinds.clear()
        self._copies.clear()

    def _is_model(self, module: Module) -> bool:
        """True where it holds what is trained. Raises NotCountedError as num_ranks_sharing."""
        entry = self._models.get(id(module))
        if entry is None or entry[0]() is not module:
            holds = self._trains(module)
            if holds:
                num_sharing = num_ranks_sharing(module)
                if num_sharing != self._num_sharing and any(
                    is_model for _, is_model in self._models.values()
                ):
                    raise NotCountedError(
                        "ranks share the work of some of the step's models and not of others"
                    )
                self._num_sharing = num_sharing
            entry = self._models[id(module)] = ref(module), holds
        return entry[1]

    def _trains(self, module: Module) -> bool:
        return any(id(parameter) in self._trained for parameter in module.parameters())

    @property
    def is_empty(self) -> bool:
        """True where the step called no model: one that was cut short, as a rule."""
        return not any(self._models[key[0]][1] for key in self._kinds) and not self._error

    def wants(self, number: int) -> bool:
        """True where the step of this number should be noted, to tell whether batches are alike."""
        return number >= self._next and not self._size_error

    def batch(self) -> tuple[int | None, int | None, str]:
        """Rows of a step's batch, or its tokens where it is a table of them, by the module that gets least (a
        discriminator gets more than a batch); and why neither is known. Of a batch that ranks share, this
        rank's part."""
        usual = self._usual()
        if self._size_error or usual is None:
            return None, None, self._size_error or (UNLIKE if any(self._sizes) else self._no_call)
        rows, tokens, _ = usual
        if (tokens or rows) % self._num_sharing:
            return None, None, f"{self._num_sharing} ranks share a batch of {tokens or rows}"
        rows, tokens = rows // self._num_sharing, tokens // self._num_sharing
        return None if tokens else rows or None, tokens or None, ""

    def _usual(self, of_first: bool = False) -> tuple[int, ...] | None:
        """Size of a step's batch, which single ones may fall short of, as the last one of an epoch does; None
        where steps differ otherwise. of_first: None too where the first one is such a step."""
        noted = [
            tuple(min((size[i] for size in step.values() if size[i]), default=0) for i in range(3))
            for step in self._sizes
            if step
        ]
        usual = max(noted, key=noted.count, default=())
        is_other = [one != usual for one in noted]
        is_more = any(own > of_usual for one in noted for own, of_usual in zip(one, usual, strict=True))
        is_single = not any(a and b for a, b in pairwise(is_other)) and 3 * sum(is_other) <= len(noted)
        is_known = bool(noted) and is_single and not is_more and not is_other[-1]
        return usual if is_known and not (of_first and is_other[0]) else None

    def count(self) -> tuple[float | None, str]:
        """FLOPs of the step, or None; and the reason. Drops what was noted. Of a model whose work ranks share
        this rank's part."""
        kinds, self._kinds = self._kinds, {}
        self._copies.clear()
        num_at, wide_bytes_at = self._copied.num_at, self._copied.wide_bytes_at
        sizes = [tuple(sorted(size[2] for size in step.values())) for step in self._sizes if step]
        self.work = WorkOfStep(
            copies=num_at.total(),
            copies_bytes=self._copied.num_bytes,
            copies_at=max(num_at, key=num_at.__getitem__, default=None),
            narrowed_bytes=float(wide_bytes_at.total()),
            narrowed_at=max(wide_bytes_at, key=wide_bytes_at.__getitem__, default=None),
            quiet=self._batches.quiet(),
            transforms=self._transforms.found(),
            num_sizes=(len({*sizes}), len(sizes)),
        )
        models = {key: kind for key, kind in kinds.items() if self._models[key[0]][1]}
        if not models:
            return None, self._error or (self._no_call if self._trained else NO_OPTIMIZER)
        self._count_of = partial(count_of, until_s=time.thread_time() + MOST_CPU_S)
        try:
            taken, parts_counted = self._graphs.parts_taken(), self._graphs.parts_counted()
            counted = {
                key: self._count_of(
                    *kind,
                    self._constant(key, kind),
                    self._fuses,
                    {place: part for (of, place), part in taken.items() if of == key[0]},
                    parts_counted=parts_counted,
                    is_cached=key in self._cached,
                )
                for key, kind in models.items()
            }
        except Exception as error:
            return None, _text_of(error)
        for key, one in counted.items():
            if key not in self._cached:
                one.needless.num_calls = max(self._graphs.num_calls[key], 1)
        total = sum(self._times[key] * one.flops for key, one in counted.items())
        if self._around is not None:
            self.precision = self._precision_of(kinds, counted)
        with suppress(Exception):  # of what trains nothing, or of a copy that trains less
            if self._num_sharing > 1:
                raise NotCountedError("what this rank does of the work is not told by lines")
            self.work = msgspec.structs.replace(self.work, **self._work_of(kinds, counted))
        if self._usual(of_first=True) is None:
            return None, UNLIKE  # they are those of one step
        return (
            (total / self._num_sharing, "") if total > 0 else (None, "torch counts no operator of the model")
        )

    def _precision_of(
        self, kinds: dict[Any, tuple[Module, Any, Any]], counted: "dict[Any, Count]"
    ) -> str | None:
        """Of a program that compiles, within whose model no call was seen. None where a wrapper of a forward,
        which may be autocast's, was left out."""
        within = Counter[torch.dtype | None]()
        for key, one in counted.items():
            within.update({dtype: self._times[key] * flops for dtype, flops in one.cast.items()})
        ((dtype, _),) = within.most_common(1) or ((None, 0),)
        if dtype is not None and self._type is not None:
            return _precision(self._type, Counter({dtype: 1}))
        is_plain = self.precision in ("fp32", "tf32")
        are_left_out = any(
            getattr(inner, LEFT_OUT, False) for copy, *_ in kinds.values() for inner in copy.modules()
        )
        return None if is_plain and are_left_out else self.precision

    def _of_frozen(self, trained: set[Any]) -> tuple[int, StackFrame | None]:
        """FLOPs of a call of the frozen module with most, of those that are called with what they were called
        with before, and its line. trained: forms of modules whose copies follow them now and then."""
        found: list[tuple[int, StackFrame | None]] = [(0, None)]
        for number, kind in self._kinds_of_frozen.items():
            with suppress(Exception):  # nothing is said of it
                if form_of(kind[0]) not in trained and self._frozen.part_again(number) >= SEEN_BEFORE:
                    flops = self._count_of(*kind, needs_gradient=False).flops
                    found.append((flops, self._frozen.lines[number]))
        return max(found, key=lambda entry: entry[0])

    def _calls_of_few_rows(
        self, kinds: dict[Any, tuple[Module, Any, Any]], counted: "dict[Any, Count]"
    ) -> CallsOfFewRows | None:
        by_model: dict[int, list[Any]] = {}
        for key in counted:
            by_model.setdefault(key[0], []).append(key)
        found = []
        for keys in by_model.values():
            times = [self._times[key] for key in keys]
            leaves = [tree_leaves(kinds[key][1:]) for key in keys]
            # What another call gave has a gradient: one comes after the other then.
            if any(getattr(leaf, "requires_grad", False) for given in leaves for leaf in given):
                continue
            rows = [next((one.shape[0] for one in given if getattr(one, "ndim", 0)), 0) for given in leaves]
            operators = [counted[key].operators[0] for key in keys]
            num, at = sum(times), max(zip(times, keys, strict=True), key=lambda entry: entry[0])[1]
            found.append(
                CallsOfFewRows(
                    num=num,
                    rows=round(sum(map(mul, times, rows)) / num),
                    operators=round(sum(map(mul, times, operators)) / num),
                    parameter_bytes=sum(one.nbytes for one in kinds[keys[0]][0].parameters()),
                    at=self._lines[at],
                )
            )
        return max(found, key=lambda one: one.num, default=None)

    def _of_discarded(
        self, kinds: dict[Any, tuple[Module, Any, Any]], counted: "dict[Any, Count]"
    ) -> dict[str, Any]:
        """FLOPs of gradients that are set back before an optimizer takes them, of the line with most, and
        what of them the step has beside those that each call has once."""
        found: list[dict[str, Any]] = []
        for one in self._graphs.discarded.found():
            own = {number for number, optimizer in self._trained.items() if optimizer == one.optimizer}
            flops = Counter[Any]()
            total = beside = 0
            is_apart = True
            for call in one.calls:
                kind = kinds[call.kind]
                if frozen := _freeze(kind[0], own):
                    left = self._count_of(*kind, needs_gradient=False, is_cached=call.kind in self._cached)
                    for parameter in frozen:
                        parameter.requires_grad_(True)
                    num = counted[call.kind].flops - left.flops
                    flops[call.kind], total = flops[call.kind] + num, total + num
                    beside += 0 if one.is_alone[call.number] else num
                    is_apart = is_apart and left.flops == left.forward[0]
            if total:
                apart_at = self._lines[max(flops, key=flops.__getitem__)]
                found.append(
                    {
                        "discarded": float(total),
                        "discarded_beside": float(beside),
                        "discarded_at": one.line,
                        "discarded_of": apart_at,
                        "discarded_is_apart": is_apart,
                    }
                )
        return max(found, key=lambda entry: entry["discarded"], default={})

    def _work_of(
        self, kinds: dict[Any, tuple[Module, Any, Any]], counted: "dict[Any, Count]"
    ) -> dict[str, Any]:
        unread = self._never_updated()
        flops, num_bytes, again_bytes = 0, 0, 0
        names = (*OF_CALLS, *OF_SUMS, *OF_OPERATORS)
        sums, tables = {name: Counter[StackFrame | None]() for name in names}, dict[int, Table]()
        owners = dict[StackFrame | None, tuple[int, _Owner]]()
        loops, rows, repeated = list[OperatorLoop](), list[LineOfWork](), 0
        for key, kind in kinds.items():
            one, times, line = counted.get(key) or self._count_of(*kind), self._times[key], self._lines[key]
            of_kind = {"again": one.again, "fp32": one.fp32}
            of_kind |= dict(zip(OF_SUMS, (one.ordered, one.indexed), strict=True))
            if key in counted and not compiled_frames():  # which joins operators
                loops += [] if (loop := one.by_line.loop()) is None else [loop.times(times)]
                rows += [row.times(times) for row in one.by_line.lines(line)]
                of_kind |= {name: getattr(one.needless, name) for name in OF_OPERATORS}
                of_kind["masked"] = one.by_line.masked()
                once_more = one.by_line.repeated()
                of_kind |= {"repeated": once_more.flops, "repeated_bytes": once_more.num_bytes}
                repeated += times * once_more.operators
            for number, table in one.needless.tables.items():
                at = table.line or line
                num = times * table.num_looked_up + (tables[number].num_looked_up if number in tables else 0)
                tables[number] = table._replace(num_looked_up=num, line=at)
            within: list[StackFrame | None] = [at for at in one.fp64 if at is not None]
            if not within or one.fp64.total() >= WHOLE * one.flops:
                within = [line]
            of_kind["fp64"] = Counter({max(within, key=one.fp64.__getitem__): one.fp64.total()})
            if frozen := _freeze(kind[0], unread):
                left = self._count_of(*kind, needs_gradient=False, is_cached=key in self._cached)
                of_kind["unread"] = Counter({line: (num := one.flops - left.flops)})
                owner = times * num, _owner_of(kind[0], frozen, one.called_at)
                owners[line] = max(owner, owners.get(line, owner), key=lambda entry: entry[0])
                for parameter in frozen:  # of a copy that other calls of the module share
                    parameter.requires_grad_(True)
            asked = [leaf for leaf in tree_leaves(kind[1:]) if getattr(leaf, "is_asked", False)]
            if asked and key in counted:
                for leaf in asked:
                    leaf.requires_grad_(False)
                left = self._count_of(*kind, needs_gradient=False, is_cached=key in self._cached)
                of_kind["inputs"] = Counter({line: one.flops - left.flops})
            flops += times * (one.flops + one.again.total())
            num_bytes, again_bytes = num_bytes + times * one.num_bytes, again_bytes + times * one.again_bytes
            for name, by_line in of_kind.items():
                sums[name].update({at or line: times * num for at, num in by_line.items()})
        of_bytes: dict[str, Any] = {"bytes": float(num_bytes), "again_bytes": float(again_bytes)}
        operators, again = (
            sum(self._times[key] * one.operators[place] for key, one in counted.items()) for place in (0, 1)
        )
        of_bytes["again_launched"] = again / max(operators, 1)
        of_bytes["repeated_launched"] = repeated / max(operators, 1)
        hoisted, solves, num_solves, checks, num_checks = (
            sum(self._times[key] * getattr(one.needless, name) for key, one in counted.items())
            for name in ("hoisted_launches", "hoisted_solves", "num_solves", "hoisted_checks", "num_checks")
        )
        of_bytes["hoisted_launched"] = hoisted / max(operators, 1)
        of_bytes["hoisted_solves"] = solves / max(2 * num_solves, 1)
        of_bytes["hoisted_checks"] = checks / max(2 * num_checks, 1)
        twice, twice_at = self._batches.again()
        before, before_at = self._of_frozen({form_of(copy) for copy, *_ in kinds.values()})
        padding, columns = self._batches.padding()
        repeats, backwards_at = self._graphs.repeats()
        derivatives = self._derivatives.found()
        of_backward = sum(self._times[key] * (one.flops - one.forward[0]) for key, one in counted.items())
        sums["rows_bytes"] = Counter[StackFrame | None]()
        looked_up = 0, 0
        for number, table in tables.items():  # of which one line may look up several
            if number in self._trained and (num := table.num_rows - table.num_looked_up) > 0:
                sums["rows_bytes"][table.line] += num * table.row_bytes
                of_table = table.num_looked_up, table.num_looked_up * table.row_bytes
                looked_up = looked_up[0] + of_table[0], looked_up[1] + of_table[1]
        found = {name: by_line for name, by_line in sums.items() if by_line.total()}
        lines = {
            f"{name.removesuffix('_bytes')}_at": max(by_line, key=by_line.__getitem__)
            for name, by_line in found.items()
        }
        is_all = any(one.needless.is_all(lines.get("unchanged_at")) for one in counted.values())
        widened_of = [one.needless.widened_of(lines.get("widened_at")) for one in counted.values()]
        hoisted_at = lines.get("hoisted_at")
        shares = [one.needless.hoisted_share(hoisted_at) for one in counted.values()]
        of_batches = {
            **self._of_discarded(kinds, counted),
            "hoisted_share": max(shares, default=0.0),
            "widened_of": next(filter(None, widened_of), None),
            "twice": float(sum(num * counted[key].forward[0] for key, num in twice.items())),
            "twice_bytes": float(sum(num * counted[key].forward[1] for key, num in twice.items())),
            "twice_at": twice_at,
            "calls": self._calls_of_few_rows(kinds, counted),
            "zeroed_bytes": float(self._graphs.zeroed_bytes()),
            "before": float(before),
            "before_at": before_at,
            "backwards": repeats * of_backward,
            "backwards_at": backwards_at,
            "derivatives": derivatives if derivatives and derivatives.of_operators else None,
            "rows_looked_up": looked_up[0],
            "rows_looked_up_bytes": float(looked_up[1]),
            "padding": padding,
            "padding_columns": columns,
            "scores_num": max((one.needless.scores_num for one in counted.values()), default=0),
            "lines": sorted(_by_line(rows), key=lambda row: -row.bytes)[:MOST_LINES],
            "loop": max(loops, key=lambda loop: loop.all_operators, default=None),
        }
        with_graph = {
            self._lines[key]
            for key, kind in kinds.items()
            if key in counted or any(getattr(leaf, "requires_grad", False) for leaf in tree_leaves(kind[1:]))
        }
        largest = max(counted, key=lambda key: self._times[key] * counted[key].flops)
        aligned = ALIGNED_OF.get(self.precision or "")
        odd = None if aligned is None else counted[largest].by_line.odd_products(aligned)
        if odd is not None and not compiled_frames():
            times = self._times[largest]
            of_bytes |= {"odd": times * odd.flops, "odd_at": odd.at, "odd_length": odd.length}
            of_bytes["odd_num"] = times * odd.num
        of_bytes |= {"model_at": self._lines[largest], "precision": self.precision or ""}
        if found.get("unused"):
            of_bytes["ignored"] = 1 - min(self._graphs.parts_counted().values(), default=1.0)
        if (called_at := lines.get("unread_at")) in owners:
            of_bytes["unread_is_apart"] = is_apart = called_at not in with_graph
            _, owner_of_most = owners[called_at]
            of_bytes |= {"unread_of": owner_of_most.name, "unread_num": owner_of_most.num_parameters}
            lines["unread_at"] = called_at if is_apart else owner_of_most.called_at or called_at
        return {"flops": float(flops), **of_bytes, **lines, **of_batches, "unchanged_is_all": is_all} | {
            name: float(one.total()) for name, one in found.items()
        }


def _by_line(rows: list[LineOfWork]) -> list[LineOfWork]:
    """Those of one line in one."""
    found: dict[StackFrame, LineOfWork] = {}
    for row in rows:
        found[row.at] = row if row.at not in found else found[row.at].plus(row)
    return [*found.values()]


def _size(module: Module, leaves: Iterable[Any]) -> tuple[int, int, int]:
    """Rows of the first tensor that has some; its entries where it is a table of token numbers: integers, for
    a model with embeddings, but not with one for each column, as categories have; and all its entries."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    first = next((one for one in tensors if one.dim() > 1), tensors[0] if tensors else None)
    if first is None:
        return 0, 0, 0
    is_table = first.dim() == 2 and first.dtype in (torch.int64, torch.int32)
    num_tables = sum(isinstance(one, torch.nn.Embedding) for one in module.modules()) if is_table else 0
    return first.shape[0], first.numel() if 0 < num_tables < first.shape[1] else 0, first.numel()


def _hands_on(module: Module) -> bool:
    """Whether its forward is Lightning's for the moment, by which a training step goes through DDP and calls
    the model within. It is a function; one that is bound is the model's own, put back."""
    with suppress(Exception):
        forward = vars(unwrapped(module)).get("forward")
        of_lightning = str(getattr(forward, "__module__", "")).startswith(
            ("lightning.", "pytorch_lightning.")
        )
        return of_lightning and not hasattr(forward, "__self__")
    return False


def _shape_text(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype}{' with gradient' if leaf.requires_grad else ''}"
    return str(leaf) if isinstance(leaf, (bool, int, float, str)) else type(leaf).__name__


class _Same:
    """A tensor that may be the same one, unwritten, step after step."""

    def __init__(self, leaf: Any = None) -> None:
        is_tensor = isinstance(leaf, torch.Tensor) and not leaf.is_inference()
        is_tensor = is_tensor and leaf.layout == torch.strided  # a sparse one has values of its own
        self.number = id(leaf) if is_tensor else 0
        self._ref: Callable[[], Any] = ref(leaf) if is_tensor else lambda: None
        self._version = leaf._version if is_tensor else 0
        # Of memory shared with numpy no version tells.
        self._some = some_of(leaf) if is_tensor and leaf.device.type == "cpu" else None
        self._was_there = is_tensor
        """In the newest step that was noted: at the end the function that held it may have returned."""
        self.times = 0
        """That it was seen again."""

    def end_step(self) -> None:
        self._was_there = self._was_there and self._ref() is not None and self.is_there()

    def is_there(self) -> bool:
        held = self._ref()
        if held is None:
            return self._was_there
        is_unwritten = bool(held._version == self._version)
        return is_unwritten and (self._some is None or torch.equal(self._some, some_of(held)))

    def seen_again(self, leaf: Any) -> "_Same":
        if self._ref() is not leaf or not self.is_there():
            return _Same()
        self.times += 1
        return self


def _may_fuse_attention() -> bool:
    """Not where the program allows scaled_dot_product_attention its plain form alone."""
    of_cuda = torch.backends.cuda
    enabled = (of_cuda.flash_sdp_enabled, of_cuda.mem_efficient_sdp_enabled, of_cuda.cudnn_sdp_enabled)
    return any(one() for one in enabled)  # type: ignore[no-untyped-call]


def _copied_parameters(copies: Iterable[Module]) -> set[int]:
    return {getattr(one, "copy_of", 0) for copy in copies for one in copy.parameters()}


def _freeze(model: Module, unread: Iterable[int]) -> list[torch.nn.Parameter]:
    """The copy's parameters of these that had a gradient: from now on they get none."""
    found = [one for one in model.parameters() if one.requires_grad and getattr(one, "copy_of", 0) in unread]
    for one in found:
        one.requires_grad_(False)
    return found


class _Owner(NamedTuple):
    """The innermost module that holds some parameters."""

    name: str
    num_parameters: int
    called_at: StackFrame | None
    """The line within the model that calls it, or a module in it; None of the model itself."""


def _owner_of(
    model: Module, parameters: list[torch.nn.Parameter], called_at: Mapping[int, StackFrame | None]
) -> _Owner:
    """Of one that torch's class has, by the program's or a library's that holds it."""
    own = {id(one) for one in parameters}
    paths = [name.split(".")[:-1] for name, one in model.named_parameters() if id(one) in own]
    path = list[str]()
    for names in zip(*paths, strict=False):
        if len({*names}) > 1:
            break
        path.append(names[0])
    holders = [(place, model.get_submodule(".".join(path[:place]))) for place in range(len(path), -1, -1)]
    inner = [called_at.get(id(one)) for one in holders[0][1].modules()] if path else []
    place, holder = next((one for one in holders if not _is_of_torch(one[1])), holders[-1])
    name = ".".join([type(holder).__name__, *path[place:]])
    return _Owner(name, len(parameters), next(filter(None, inner), None))


def _is_of_torch(module: Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _type_of(module: Module) -> torch.dtype:
    """That of most of its parameters, or that which FSDP makes of them."""
    sizes = Counter[torch.dtype]()
    for parameter in module.parameters():
        sizes[parameter.dtype] += parameter.numel()
    units = (
        getattr(getattr(inner._get_fsdp_state(), "_mp_policy", None), "param_dtype", None)  # type: ignore[operator]
        for inner in module.modules()
        if hasattr(type(inner), "_get_fsdp_state")
    )
    return next((unit for unit in units if unit is not None), sizes.most_common(1)[0][0])


def _precision(dtype: torch.dtype, cast: Counter[torch.dtype | None]) -> str | None:
    """'bf16', as peaks of devices are named; None of another type. cast: entries of weights by the type that
    autocast makes of them."""
    ((most, _),) = cast.most_common(1) or ((None, 0),)
    dtype = most or dtype
    if dtype == torch.float32 and float32_matmul_precision(torch) != "highest":
        return "tf32"
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(dtype)


def _text_of(error: Exception) -> str:
    """Not in torch's words, which speak of a device that the program does not know of."""
    went_through = [
        StackFrame(frame.f_code.co_filename, line, frame.f_code.co_qualname, True)
        for frame, line in walk_tb(error.__traceback__)
        if library_of(frame.f_code.co_filename) not in ("torch", OWN, PYTHON)
    ]
    at = f" (at {went_through[-1].text})" if went_through else ""
    if isinstance(error, NotCountedError):
        return f"{error}{at}"
    return f"the model does not run without data: {type(error).__name__}{at}"
