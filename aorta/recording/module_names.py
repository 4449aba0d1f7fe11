"""Which module a collective is for: a unit of fully_shard, a bucket of DistributedDataParallel, a layer.

fully_shard issues the collectives of a unit from two methods of its parameter group, which knows its module's
name. DDP's reducer issues those of its buckets in C++, in the order of the buckets, so that their place among
the collectives of a backward pass names them. Those of layers (tensor parallelism, experts) are looked at in
few steps (call_origins.py) and named by their place in all others (learned_names.py). What is launched
within Optimizer.step is the optimizer's.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ReferenceType, ref

from aorta.recording.call_origins import CallOrigins
from aorta.recording.calls import CollectiveCall, RecordedStep
from aorta.recording.host.phases import Phases, issued_ns
from aorta.recording.interception.replaced import ReplacedMethods
from aorta.recording.interception.uncompiled import uncompiled
from aorta.recording.journal import Journal
from aorta.recording.learned_names import LearnedNames

FSDP_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
DDP_MODULE = "torch.nn.parallel.distributed"
MOST_LOOKS = 4
"""Steps in a row with as many collectives in which DDP is asked for its buckets."""
FIRST_LOOKS = 24
"""Steps that are looked at because the one before them issued something unknown, at most."""
LOOKS_EVERY = 256
"""A step is looked at to see whether names still hold; in the beginning at each power of two."""
MOST_CALLS = 4096
"""Of a step that are looked at."""
ROOT = "root"
"""Name of the unit that is the whole model: what no other unit holds."""


class ModuleNames:
    """Names collectives while it is installed."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._units: ReplacedMethods | None = None
        self._replicas: ReplacedMethods | None = None
        self._replica: ReferenceType[Any] | None = None
        self._bucket_names: list[str] = []
        self._num_calls = self._num_looks = 0
        self._installed = False
        self._origins = CallOrigins()
        self._learned = LearnedNames()
        self._looked_at: set[int] | None = None
        """Ids of the calls that this step's looks may have named; None: not looked at."""
        self._num_steps = 0
        self._num_first_looks = 0
        self._has_unnamed = True
        """The last step issued collectives that no library names."""
        self._has_unknown = True

    def install(self) -> None:
        self._installed = True
        self.look()

    def uninstall(self) -> None:
        self._installed = False
        self.leave_step()
        for methods in (self._units, self._replicas):
            if methods is not None:
                methods.restore()
        self._units = self._replicas = None

    def look(self) -> None:
        """Between two steps: the program may have imported what is to be watched by now."""
        if not self._installed:
            return
        if self._units is None and FSDP_MODULE in sys.modules:
            self._units = self._watch_units(sys.modules[FSDP_MODULE])
        if self._replicas is None and DDP_MODULE in sys.modules:
            self._replicas = self._watch_replicas(sys.modules[DDP_MODULE])

    # -- steps -----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Before a step: look where its calls come from, if it is time to."""
        self.leave_step()
        self.look()
        if not self._installed:
            return
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
        """No call is looked at any more."""
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
        """At the end of a step's body: name its collectives."""
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
        self.name_buckets(step)
        if self._has_unnamed:
            name_updates(step)

    # -- fully_shard and DDP ---------------------------------------------------------------------

    def _watch_units(self, module: Any) -> ReplacedMethods:
        methods = ReplacedMethods(module.FSDPParamGroup)
        journal = self._journal

        def named(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(self: Any, *args: Any, **named: Any) -> Any:
                outer_module, journal.module = journal.module, self._module_fqn or ROOT
                try:
                    return original(self, *args, **named)
                finally:
                    journal.module = outer_module

            return call

        for name in ("unshard", "post_backward"):
            if name in vars(module.FSDPParamGroup):
                methods.replace(name, named)
        return methods

    def _watch_replicas(self, module: Any) -> ReplacedMethods:
        methods = ReplacedMethods(module.DistributedDataParallel)
        names = self

        def watched(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(self: Any, *args: Any, **named: Any) -> Any:
                names._replica = ref(self)
                return original(self, *args, **named)

            return call

        if "_pre_forward" in vars(module.DistributedDataParallel):
            methods.replace("_pre_forward", watched)
        return methods

    def name_buckets(self, step: RecordedStep) -> None:
        """At the end of a step's body: name the collectives that DDP's reducer issued in it."""
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
            self._bucket_names = bucket_names(replica)
        names = self._bucket_names
        if names and len(calls) % len(names) == 0:  # once per backward pass that reduces
            for place, call in enumerate(calls):
                call.module = names[place % len(names)]


def name_updates(step: RecordedStep) -> None:
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


def bucket_names(replica: Any) -> list[str]:
    """By bucket: 'bucket 0: head.weight and 3 more'; [] where torch does not tell."""
    with suppress(Exception):  # a prototype of torch's, made for people
        data = replica._get_ddp_logging_data()
        indices = data.get("rebuilt_per_bucket_param_indices") or data.get("initial_per_bucket_param_indices")
        parameters = [
            name for name, parameter in replica.module.named_parameters() if parameter.requires_grad
        ]
        if not indices:
            return []
        return [
            f"bucket {number}: {_listed([parameters[int(i)] for i in bucket.split()])}"
            for number, bucket in enumerate(indices.split(", "))
        ]
    return []


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
