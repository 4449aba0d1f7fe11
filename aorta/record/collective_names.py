"""Names of collectives: the fully_shard unit, DDP bucket, module or optimizer that each one is for.

ModuleNames is installed by the recorder. Units of fully_shard and of FullyShardedDataParallel say themselves
what they gather; DDP's buckets are assigned by their order, calls within Optimizer.step by their time. For
the rest CallOrigins looks, in a few steps, which module's frames or autograd nodes a call comes from, and
LearnedNames gives these names to the same sequence of calls in the other steps, which pay nothing for it.
"""

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import attrgetter
from os.path import commonprefix
from threading import get_ident
from types import CodeType, FrameType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch.nn import Module

from aorta.record.host import Phases, issued_ns
from aorta.record.interception.replaced import ReplacedMethods, left_uncompiled, uncompiled
from aorta.record.journal import Journal
from aorta.steps.notes import CollectiveCall, Group, RecordedStep

FSDP_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
FSDP1_MODULE = "torch.distributed.fsdp._runtime_utils"
DDP_MODULE = "torch.nn.parallel.distributed"
ROOT = "root"
"""Name of the unit that is the whole model: what no other unit holds."""
FIRST_LOOKS = 24
"""Limit of steps that are looked at because the one before them issued something unknown."""
LOOKS_EVERY = 256
"""Steps between two looks whether names still hold; in the beginning each power of two is looked at, too."""
MOST_LOOKS = 4
"""Limit of steps in a row with as many collectives in which DDP is asked for its buckets."""
MOST_CALLS = 4096
"""Limit of calls of a step that are looked at."""
LOOKS = 2
"""Steps that have to agree before their names are given to others."""
MOST_SEQUENCES = 64
"""Limit of different sequences of collectives that are remembered."""

# How CallOrigins reads frames and nodes:
_CALL = Module._call_impl.__code__
"""The frame of a module's call."""
_BACKWARD = "_engine_run_backward"
"""The frame of a backward pass, which autograd runs on this thread."""
_UPDATE = "Optimizer.profile_hook_step.<locals>.wrapper"
"""The frame of an optimizer's step()."""
_COMPILED = ("/torch/_dynamo/", "/torch/_functorch/_aot_autograd/", "/torch/_inductor/")
"""Files whose frames run compiled code, in which modules are not told apart."""
_NOT_COMPILED = "DisableContext."
"""A frame of torch._dynamo that does not hide modules: it calls what is not compiled."""
_AHEAD = (
    "/torch/distributed/fsdp/",
    "/deepspeed/runtime/zero/",
    "/megatron/core/distributed/",
    "/fairscale/",
)
"""Libraries that gather parameters of one module while another one is called."""
_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))
"""Parts of qualified names that wrappers add, left out of names."""
_REPLICAS = frozenset(("DistributedDataParallel", "DataParallel"))
"""Classes whose one child `module` is the model."""
_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_number: Callable[[], int] | None = getattr(torch.autograd, "_get_sequence_nr", None)


class ModuleNames:
    """Names the collectives of each step, at the end of its body, while it is installed."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._units: ReplacedMethods | None = None
        """Replaced methods of fully_shard's units; None while the program has not imported it."""
        self._flat_units: ReplacedMethods | None = None
        """Replaced functions of FullyShardedDataParallel; None as above."""
        self._replicas: ReplacedMethods | None = None
        """Replaced methods of DDP; None while the program has not imported it."""
        self._replica: ReferenceType[Any] | None = None
        """The DDP that ran last."""
        self._bucket_names: list[str] = []
        self._num_calls = self._num_looks = 0
        """All-reduces of DDP in the last step, and how often DDP was asked while there were as many."""
        self._installed = False
        self._origins = CallOrigins()
        self._learned = LearnedNames()
        self._looked_at: set[int] | None = None
        """Ids of the calls that were looked at in this step; None: the step is not looked at."""
        self._num_steps = 0
        self._num_first_looks = 0
        self._has_unnamed = True
        """True: the last step issued collectives that no library names."""
        self._has_unknown = True
        """True: the last step issued collectives that were not learned yet."""

    def install(self) -> None:
        self._installed = True
        self._watch_imported()

    def uninstall(self) -> None:
        self._installed = False
        self.leave_step()
        for methods in (self._units, self._flat_units, self._replicas):
            if methods is not None:
                methods.restore()
        self._units = self._flat_units = self._replicas = None

    def _watch_imported(self) -> None:
        """Replace methods of fully_shard, FSDP and DDP that the program has imported by now."""
        if self._units is None and FSDP_MODULE in sys.modules:
            self._units = self._watch_units(sys.modules[FSDP_MODULE])
        if self._flat_units is None and FSDP1_MODULE in sys.modules:
            self._flat_units = self._watch_flat_units(sys.modules[FSDP1_MODULE])
        if self._replicas is None and DDP_MODULE in sys.modules:
            self._replicas = self._watch_replicas(sys.modules[DDP_MODULE])

    # -- steps -----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Called before a step: look where its calls come from, if it is time to."""
        self.leave_step()
        if not self._installed:
            return
        self._watch_imported()
        number = self._num_steps
        self._num_steps += 1
        if number == 0 or not self._has_unnamed:  # the first step compiles, allocates and connects
            return
        if self._has_unknown and self._num_first_looks < FIRST_LOOKS:
            self._num_first_looks += 1
        elif number % LOOKS_EVERY and number & (number - 1):
            return
        self._looked_at = set()
        self._origins.begin()
        self._journal.look_at = self._look_at

    def leave_step(self) -> None:
        """Stop looking at calls."""
        if self._looked_at is not None:
            self._looked_at = None
            self._journal.look_at = None
            self._origins.end()

    @uncompiled
    def _look_at(self, call: CollectiveCall) -> None:
        looked_at = self._looked_at
        if call.module is None and looked_at is not None and len(looked_at) < MOST_CALLS:
            looked_at.add(id(call))
            with suppress(Exception):  # frames and nodes of any program
                call.module = self._origins.module()

    def end_body(self, step: RecordedStep) -> None:
        """Called at the end of a step's body: name its collectives."""
        looked_at = self._looked_at
        self.leave_step()
        if not step.calls:
            self._has_unnamed = False
            return
        if looked_at is None:
            self._has_unnamed = not all([call.module for call in step.calls])
            if self._has_unnamed:
                self._has_unknown = not self._learned.name(step)
        else:
            self._has_unnamed = bool(looked_at)
            if looked_at and len(looked_at) < MOST_CALLS:
                self._has_unknown = not self._learned.learn(step, looked_at)
        # Last, for calls that nothing better names: whole buckets of DDP, and what Optimizer.step issued.
        self._name_buckets(step)
        if self._has_unnamed:
            _name_updates(step)

    # -- fully_shard and DDP ---------------------------------------------------------------------

    def _watch_units(self, module: Any) -> ReplacedMethods:
        """Have fully_shard's units note their names in the journal while they communicate."""
        names = ("unshard", "post_backward")
        return self._named(module.FSDPParamGroup, names, lambda unit, *_: unit._module_fqn or ROOT)

    def _watch_flat_units(self, module: Any) -> ReplacedMethods:
        """The same of FullyShardedDataParallel, whose units are named by what their flat parameters hold."""
        names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

        def name_of(state: Any, handle: Any, *_: Any) -> str:
            if handle not in names:
                names[handle] = _name_of_flat(state, handle)
            return names[handle]

        return self._named(module, ("_unshard", "_reduce_grad"), name_of)

    def _named(self, owner: Any, replaced: tuple[str, ...], name_of: Callable[..., str]) -> ReplacedMethods:
        """Replace methods, within which collectives are of a module that name_of makes of arguments."""
        methods, journal = ReplacedMethods(owner), self._journal

        def within(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                outer_module = journal.module
                with suppress(Exception):  # of a version of torch that keeps its names elsewhere
                    journal.module = name_of(*args)
                try:
                    return original(*args, **named)
                finally:
                    journal.module = outer_module

            return call

        for name in replaced:
            if name in vars(owner):
                methods.replace(name, within)
        return methods

    def _watch_replicas(self, module: Any) -> ReplacedMethods:
        """Notice which DistributedDataParallel runs: its reducer, in C++, does not say what it reduces."""
        methods = ReplacedMethods(module.DistributedDataParallel)
        names, is_compiling = self, torch.compiler.is_compiling

        def noting_replica(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(self: Any, *args: Any, **named: Any) -> Any:
                if not is_compiling():
                    names._replica = ref(self)
                return original(self, *args, **named)

            return call

        if "_pre_forward" in vars(module.DistributedDataParallel):
            methods.replace("_pre_forward", noting_replica, partial(left_uncompiled, with_called=False))
        return methods

    def _name_buckets(self, step: RecordedStep) -> None:
        """Name the collectives that DDP's reducer issued in the step."""
        replica = None if self._replica is None else self._replica()
        if replica is None:
            return
        group = self._journal.group(replica.process_group)
        calls = [
            call
            for call in step.calls
            if call.module is None and call.is_async and call.op == "all_reduce" and call.group is group
        ]
        if not calls:
            return
        phases = Phases(step)
        calls = [call for call in calls if phases.of_call(call) == "backward"]
        if len(calls) != self._num_calls:
            self._num_calls, self._num_looks = len(calls), 0
        if self._num_looks < MOST_LOOKS:  # DDP makes its buckets anew after the first passes
            self._num_looks += 1
            self._bucket_names = _names_of_buckets(replica)
        names = self._bucket_names
        if names and len(calls) % len(names) == 0:  # once per backward pass that reduces
            for place, call in enumerate(calls):
                call.module = names[place % len(names)]


def _name_of_flat(state: Any, handle: Any) -> str:
    """The innermost module that holds all parameters of a unit of FullyShardedDataParallel."""
    flat, names_of = handle.flat_param, state._exec_order_data.param_to_fqn
    parameters = [flat] if flat in names_of else flat._params  # the originals, where they are in use
    owners = [name.split(".")[:-1] for parameter in parameters for name in names_of[parameter]]
    return ".".join(commonprefix(owners)) or ROOT


def _name_updates(step: RecordedStep) -> None:
    """Name what was launched within Optimizer.step, after the backward passes of its closure."""
    updates = sorted(
        (note.start_ns, note.end_ns, note.where) for note in step.host_notes if note.kind == "optimizer"
    )
    if not updates:
        return
    backward_ends = [note.end_ns for note in step.host_notes if note.kind == "backward"]
    since_ns = [max([start, *(ns for ns in backward_ends if start < ns < end)]) for start, end, _ in updates]
    for call in step.calls:
        if call.module is None:
            at_ns = issued_ns(call)
            for start_ns, (_, end_ns, place) in zip(since_ns, updates, strict=True):
                if start_ns <= at_ns <= end_ns:  # the outer one of two that are nested: it comes first
                    call.module = f"optimizer: {place.partition(' ')[0]}"
                    break


def _names_of_buckets(replica: Any) -> list[str]:
    """Return names such as 'bucket 0: head.weight and 3 more', by the largest tensor of each bucket.

    [] where torch does not tell.
    """
    with suppress(Exception):  # a prototype of torch's, made for people
        data = replica._get_ddp_logging_data()
        indices = data.get("rebuilt_per_bucket_param_indices") or data.get("initial_per_bucket_param_indices")
        parameters = [
            (name, parameter.numel())
            for name, parameter in replica.module.named_parameters()
            if parameter.requires_grad
        ]
        if not indices:
            return []
        return [
            f"bucket {number}: {_listed([parameters[int(i)] for i in bucket.split()])}"
            for number, bucket in enumerate(indices.split(", "))
        ]
    return []


def _listed(parameters: list[tuple[str, int]]) -> str:
    """Named by its largest tensor, the first of equals. parameters: names and numbers of elements."""
    largest = max(parameters, key=lambda parameter: parameter[1])[0]
    return largest if len(parameters) == 1 else f"{largest} and {len(parameters) - 1} more"


class CallOrigins:
    """Looks which module a call comes from, by frames and autograd nodes, between `begin` and `end`."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[ReferenceType[Module], str]] = {}
        """Names of modules by id, with a weak reference: ids are used again."""
        self._hiding: dict[str, bool] = {}
        """True, by a file's name, where its frames hide which module called."""
        self._numbers = _NodeNumbers()
        self._thread = 0
        """The thread that numbers the nodes: each thread counts its own."""
        self._call_impl: Callable[..., Any] | None = None
        self._wrapper: Callable[..., Any] | None = None
        self._has_compiled = False
        self._second_order = False
        self.follows_nodes = False
        """True: calls in backward passes can be named, too."""

    def begin(self) -> None:
        """Note from now on which module makes which autograd nodes.

        Not where something is compiled: compiled code is only valid for the Module._call_impl that it saw.
        """
        self.end()
        self._has_compiled = self._has_compiled or compiled_frames() > 0
        if _next_number is not None and not self._has_compiled:
            self._follow_nodes()
        self.follows_nodes = self._call_impl is not None

    def end(self) -> None:
        """Put back what was replaced, and forget all modules."""
        if self._call_impl is not None and vars(Module).get("_call_impl") is self._wrapper:
            Module._call_impl = self._call_impl  # type: ignore[method-assign]
        self._call_impl = self._wrapper = None
        self._names.clear()
        self._numbers = _NodeNumbers()

    @uncompiled
    def module(self) -> str | None:
        """Return the qualified name of the module that issues the call being noted; None if uncertain."""
        callers: list[Module | None] = []
        frame: FrameType | None = sys._getframe(1)
        backward_is_above = False
        while frame is not None:
            code = frame.f_code
            if code is _CALL:
                callers.append(frame.f_locals["self"])
            elif code.co_name == _BACKWARD:
                backward_is_above = True
                break
            elif code.co_qualname == _UPDATE:  # of an optimizer, which may run in a backward pass
                return self._name_of(callers)
            elif self._hides(code):
                callers.append(None)
            frame = frame.f_back
        named = self._name_of(callers)
        if named is not None or callers:
            return named
        return self._from_node(backward_is_above)

    def _hides(self, code: CodeType) -> bool:
        path = code.co_filename
        hides = self._hiding.get(path)
        if hides is None:
            hides = self._hiding[path] = any(part in path for part in (*_COMPILED, *_AHEAD))
        return hides and not code.co_qualname.startswith(_NOT_COMPILED)

    def _name_of(self, callers: list[Module | None]) -> str | None:
        """Return the innermost caller's name. callers: innermost first, None for what hides further ones."""
        outermost = next((module for module in reversed(callers) if module is not None), None)
        if outermost is None:
            return None
        if self._named(id(outermost)) is None:
            self._names.update(qualified_names(outermost))
        for module in callers:
            if module is None:
                return None
            name = self._named(id(module))
            if name is not None:
                return name
        return None

    def _named(self, key: int) -> str | None:
        entry = self._names.get(key)
        return None if entry is None or id(entry[0]()) != key else entry[1]

    # -- nodes of autograd -----------------------------------------------------------------------

    def _from_node(self, backward_is_above: bool) -> str | None:
        node = _node() if self.follows_nodes else None
        if node is None:
            return None
        if torch.is_grad_enabled():  # the nodes that this makes may be numbered by another thread
            self._second_order = True
        recomputed = backward_is_above and get_ident() != self._thread  # and numbered there
        if self._second_order or recomputed:
            return None
        return self._named(self._numbers.module_at(node._sequence_nr()))

    def _follow_nodes(self) -> None:
        original: Callable[..., Any] = Module._call_impl
        numbers, thread, next_number = self._numbers, get_ident(), _next_number
        assert next_number is not None

        def _call_impl(self: Module, *args: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or get_ident() != thread:
                return original(self, *args, **named)
            numbers.enter(next_number(), id(self))
            try:
                return original(self, *args, **named)
            finally:
                numbers.leave(next_number())

        self._thread = thread
        self._call_impl, self._wrapper = original, _call_impl
        Module._call_impl = _call_impl  # type: ignore[method-assign]


class _NodeNumbers:
    """Knows which module's call was the innermost when autograd numbered its nodes."""

    __slots__ = ("_modules", "_numbers", "_open")

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._modules: list[int] = []
        """Id of the innermost module from each of these numbers on; 0: none."""
        self._open: list[int] = [0]

    def enter(self, number: int, module: int) -> None:
        self._open.append(module)
        self._numbers.append(number)
        self._modules.append(module)

    def leave(self, number: int) -> None:
        self._open.pop()
        self._numbers.append(number)
        self._modules.append(self._open[-1])

    def module_at(self, number: int) -> int:
        place = bisect_right(self._numbers, number) - 1
        return self._modules[place] if place >= 0 else 0


def qualified_names(root: Module) -> dict[int, tuple[ReferenceType[Module], str]]:
    """Return names of modules by id, without what wrappers add; the root is named by its class."""
    is_replica = type(root).__name__ in _REPLICAS
    names = {}
    for path, module in root.named_modules():
        parts = [part for part in path.split(".") if part not in _WRAPPERS]
        if is_replica and parts[0] == "module":
            del parts[0]
        names[id(module)] = ref(module), ".".join(parts) or type(module).__name__
    return names


def compiled_frames() -> int:
    """At least: with fullgraph=True torch counts graphs alone."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return sum(counters.get("frames", {}).values()) or counters.get("stats", {}).get("unique_graphs", 0)


Key = tuple[Group, tuple[str, ...]]
"""A group and the operations of a step in it, in order."""


class LearnedNames:
    """Gives calls the names that calls at the same places had in steps that were looked at."""

    def __init__(self) -> None:
        self._sequences: dict[Key, _Sequence] = {}

    def learn(self, step: RecordedStep, looked_at: set[int]) -> bool:
        """Learn from a step; True once all that it issued is known. looked_at: ids of the calls looked at."""
        is_known = True
        for key, calls in _by_group(step):
            names = [call.module if id(call) in looked_at else None for call in calls]
            sequence = self._sequences.get(key)
            if sequence is not None:
                sequence.confirm(calls, names)
            elif len(self._sequences) < MOST_SEQUENCES:
                sequence = self._sequences[key] = _Sequence(calls, names)
            is_known &= sequence is not None and sequence.num_looks >= LOOKS
        return is_known

    def name(self, step: RecordedStep) -> bool:
        """Name the calls that have none; True if all that the step issued was known."""
        is_known = True
        for key, calls in _by_group(step):
            sequence = self._sequences.get(key)
            if sequence is None or sequence.num_looks < LOOKS:
                is_known = False
            elif sequence.has_names:
                is_known &= sequence.name(calls)
        return is_known


class _Sequence:
    """The collectives of a group in a step, as they were looked at."""

    __slots__ = ("has_names", "names", "num_looks", "sizes")

    def __init__(self, calls: list[CollectiveCall], names: list[str | None]) -> None:
        self.names = names
        self.sizes: list[int | None] = [call.bytes for call in calls]
        """Bytes of each call; None: they differ from step to step (tokens of experts)."""
        self.num_looks = 1
        self.has_names = any(names)

    def confirm(self, calls: list[CollectiveCall], names: list[str | None]) -> None:
        """Note a second look; a name or a size that differs is not known any more."""
        self.num_looks += 1
        for place, call in enumerate(calls):
            if self.names[place] != names[place]:
                self.names[place] = None
            if self.sizes[place] != call.bytes:
                self.sizes[place] = None
        self.has_names = any(self.names)

    def name(self, calls: list[CollectiveCall]) -> bool:
        """Name the calls; False where sizes differ, and nothing is named."""
        for call, size in zip(calls, self.sizes, strict=True):
            if size is not None and call.bytes != size:
                return False
        for call, name in zip(calls, self.names, strict=True):
            if call.module is None:
                call.module = name
        return True


_group = attrgetter("group")


def _by_group(step: RecordedStep) -> Iterator[tuple[Key, list[CollectiveCall]]]:
    by_group: dict[Group, list[CollectiveCall]] = {}
    for group, run in groupby(step.calls, _group):
        by_group.setdefault(group, []).extend(run)
    for group, calls in by_group.items():
        yield (group, tuple([call.op for call in calls])), calls
