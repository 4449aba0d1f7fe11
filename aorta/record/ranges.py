"""Names stretches of a step in traces: by NVTX (ROCTx on ROCm) for nsys and rocprofv3, and by annotations of
torch.profiler while it runs. train.py uses it.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from aorta.config.structs import ProfilingConfig
from aorta.device.backend import accelerator
from aorta.record.interception.works import Launch, Observer
from aorta.timeline.types import STEP_ANNOTATION

log = logging.getLogger(__name__)

_NOTHING: AbstractContextManager[object] = nullcontext()


class Ranges:
    """Makes contexts: `with ranges("forward"):`. Costs one test where nothing is to be marked."""

    def __init__(self, profiling: ProfilingConfig, markers: Any = None) -> None:
        """markers: range_push and range_pop, as torch's bindings of NVTX have them."""
        self._markers = None
        if profiling.ranges:
            self._markers = markers if markers is not None else _device_markers()

    def __call__(self, name: str) -> AbstractContextManager[object]:
        profiled = torch._C._autograd._profiler_enabled()
        if self._markers is None and not profiled:
            return _NOTHING
        return _Range(name, self._markers, profiled)

    def step(self, global_step: int) -> AbstractContextManager[object]:
        """Mark a step by the name that readers of traces look for; in torch.profiler the recorder does it."""
        if self._markers is None:
            return _NOTHING
        return _Range(f"{STEP_ANNOTATION}{global_step}", self._markers, False)

    def observer(self, observer: Observer) -> Observer:
        """Return the observer with a range around each launch of a collective."""
        return observer if self._markers is None else _RangedObserver(observer, self._markers)


def _device_markers() -> Any:
    if not accelerator().is_available():
        log.warning("profiling.ranges: there is no GPU, so nothing marks ranges")
        return None
    return accelerator().range_markers()


class _Range:
    __slots__ = ("_annotation", "_markers", "_name")

    def __init__(self, name: str, markers: Any, profiled: bool) -> None:
        self._name, self._markers = name, markers
        self._annotation: Any = torch.profiler.record_function(name) if profiled else None

    def __enter__(self) -> Self:
        if self._markers is not None:
            self._markers.range_push(self._name)
        if self._annotation is not None:
            self._annotation.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        if self._markers is not None:
            self._markers.range_pop()


class _RangedObserver:
    """Marks the launch of each collective with its operation, bytes and type; else as the inner observer."""

    def __init__(self, inner: Observer, markers: Any) -> None:
        self._inner, self._markers = inner, markers

    def observe(
        self,
        group: ProcessGroup,
        op: str,
        tensors: Any,
        num_bytes: int,
        dtype: str,
        is_async: bool,
        launch: Launch,
        peer: int | None = None,
    ) -> Work:
        self._markers.range_push(f"aorta.{op} {num_bytes} bytes {dtype}")
        try:
            return self._inner.observe(group, op, tensors, num_bytes, dtype, is_async, launch, peer)
        finally:
            self._markers.range_pop()

    def numbered_itself(self, group: ProcessGroup, num_calls: int) -> None:
        self._inner.numbered_itself(group, num_calls)

    def coalescing_started(self, group: ProcessGroup) -> None:
        self._inner.coalescing_started(group)

    def coalescing_ended(self, group: ProcessGroup, launch: Launch) -> Work | None:
        self._markers.range_push("aorta.coalesced")
        try:
            return self._inner.coalescing_ended(group, launch)
        finally:
            self._markers.range_pop()
