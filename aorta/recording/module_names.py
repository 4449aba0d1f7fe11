"""Which module a collective is for: the unit of fully_shard, the bucket of DistributedDataParallel.

fully_shard issues the collectives of a unit from two methods of its parameter group, which knows its module's
name. DDP's reducer issues those of its buckets in C++, in the order of the buckets, so that their place among
the collectives of a backward pass names them.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ReferenceType, ref

from aorta.recording.calls import RecordedStep
from aorta.recording.host_phases import Phases
from aorta.recording.interception.replaced import ReplacedMethods
from aorta.recording.journal import Journal

FSDP_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
DDP_MODULE = "torch.nn.parallel.distributed"
MOST_LOOKS = 4
"""Steps in a row with as many collectives in which DDP is asked for its buckets."""
ROOT = "root"
"""Name of the unit that is the whole model: what no other unit holds."""


class ModuleNames:
    """Names the collectives of fully_shard and of DDP while it is installed."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._units: ReplacedMethods | None = None
        self._replicas: ReplacedMethods | None = None
        self._replica: ReferenceType[Any] | None = None
        self._bucket_names: list[str] = []
        self._num_calls = self._num_looks = 0
        self._installed = False

    def install(self) -> None:
        self._installed = True
        self.look()

    def uninstall(self) -> None:
        self._installed = False
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
        calls = [c for c in step.calls if c.op == "all_reduce" and c.is_async and c.module is None]
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
