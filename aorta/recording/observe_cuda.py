"""Times collectives on CUDA and HIP by events, without waiting for the device.

Synchronous collectives (torch >= 2.8: they run on the caller's stream) lie between two marks on
that stream, or, with dedicated placement, run on a stream named for the operation:

    caller:     ... mark start ─────────────────────────── wait(end) ...
    dedicated:        wait(start) ── collective ── mark end

so the collective follows all that the caller had queued, and all that the caller queues next
follows the collective, as without us. Tensors need no record_stream for the same reason.

Asynchronous ones run on the process group's own stream. A probe stream that waits for the work
and does nothing else carries the end mark. The group's stream and its communicator are first in,
first out, so the start is the later of the start mark and the end of the group's previous call.
"""

import os
import time
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from aorta.device.cuda import (
    EventClock,
    NamedStreams,
    current_raw_stream,
    current_stream,
    is_capturing,
    set_stream,
    wait_event,
)
from aorta.recording.calls import Call, Wait
from aorta.recording.interception import Launch
from aorta.recording.journal import Journal
from aorta.recording.stalls import BackwardWatch
from aorta.recording.works import DoneWork, TimedWork

_DEDICATED = {
    "all_reduce": "allreduce",
    "reduce_scatter": "reducescatter",
    "all_gather": "allgather",
    "all_to_all": "alltoall",
}
"""Operations that dedicated placement moves, and the stream each runs on."""


class CudaObserver:
    def __init__(self, journal: Journal, dedicated: bool) -> None:
        self._journal = journal
        self._dedicated = dedicated
        self._done = DoneWork()
        # Set by attach, before the first step; until then nothing is timed.
        self._clock: EventClock
        self._streams: NamedStreams
        self._backward: BackwardWatch
        self._device_index = 0
        # A blocking wait would stop the host at the probe, and NCCL_BLOCKING_WAIT asks for that.
        self._wait_blocks = any(
            os.environ.get(name, "0") not in ("", "0")
            for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
        )

    def attach(self, clock: EventClock) -> None:
        """The device is known: time the calls of the steps from now on."""
        self._clock = clock
        self._streams = NamedStreams(clock.device)
        self._backward = BackwardWatch(self._journal, clock)
        self._device_index = clock.device.index

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
        known = self._journal.group(group)
        call = Call(known, op, num_bytes, dtype, is_async, peer)
        if known.coalescing is not None:
            known.coalescing.append(call)
            return launch() or self._done
        reason = self._why_untimed()
        if reason is not None:
            call.reason = reason
            self._journal.add_call(call)
            return _finished(launch(), call, self._done)
        return self._timed(call, tensors, launch)

    def coalescing_started(self, group: ProcessGroup) -> None:
        self._journal.coalescing_started(group)

    def coalescing_ended(self, group: ProcessGroup, launch: Launch) -> Work | None:
        work: Work | None
        call = self._journal.coalescing_ended(group)
        if call is not None:
            call.reason = self._why_untimed()
            if call.reason is not None:
                self._journal.add_call(call)
        if call is None or call.reason is not None:
            work = launch()
            return work
        # NCCL launches the whole group here; sync or async shows in whether it returns a work.
        caller = current_stream(self._device_index)
        call.start = self._clock.mark(caller)
        call.on_compute = self._is_compute(caller.cuda_stream)
        work = launch()
        call.launched_ns = time.monotonic_ns()
        call.is_async = work is not None
        if work is None:
            call.end = self._clock.mark(caller)
            self._note_synchronous(call, caller.cuda_stream)
        self._journal.add_call(call)
        return None if work is None else self._probe(call, caller, None, work)

    # -- one call -----------------------------------------------------------------------------

    def _timed(self, call: Call, tensors: Any, launch: Launch) -> Work:
        caller = current_stream(self._device_index)
        if call.is_async:
            self._backward.async_call()
            return self._asynchronous(call, caller, tensors, launch)
        name = _DEDICATED.get(call.op) if self._dedicated else None
        if name is None:
            self._in_place(call, caller, launch)
        else:
            self._run_on(name, call, caller, launch)
        self._note_synchronous(call, caller.cuda_stream)
        if name is not None:
            call.stream = name
        self._journal.add_call(call)
        return self._done

    def _asynchronous(self, call: Call, caller: torch.cuda.Stream, tensors: Any, launch: Launch) -> Work:
        start = self._clock.mark(caller)
        work = launch()
        call.launched_ns = time.monotonic_ns()
        call.start = start
        call.on_compute = self._is_compute(caller.cuda_stream)
        self._journal.add_call(call)
        if work is None:
            call.end = self._clock.mark(caller)
            self._note_synchronous(call, caller.cuda_stream)
            return self._done
        return self._probe(call, caller, tensors, work)

    def _in_place(self, call: Call, caller: torch.cuda.Stream, launch: Launch) -> None:
        start = self._clock.mark(caller)
        work = launch()
        call.launched_ns = time.monotonic_ns()
        if work is not None:
            work.wait()
        call.start, call.end = start, self._clock.mark(caller)

    def _run_on(self, name: str, call: Call, caller: torch.cuda.Stream, launch: Launch) -> None:
        stream = self._streams[name]
        start = self._clock.mark(caller)
        wait_event(stream, start)  # the inputs were written by the caller
        set_stream(stream)
        try:
            work = launch()
            call.launched_ns = time.monotonic_ns()
            if work is not None:
                work.wait()
            call.start, call.end = start, self._clock.mark(stream)
        finally:
            set_stream(caller)
        # The caller goes on after the collective, as after a synchronous call on its own stream.
        wait_event(caller, call.end)

    def _note_synchronous(self, call: Call, raw_stream: int) -> None:
        call.on_compute = call.blocks = self._is_compute(raw_stream)
        call.stream = "compute" if call.blocks else "side"

    def _is_compute(self, raw_stream: int) -> bool:
        step = self._journal.current
        return step is not None and raw_stream == step.compute_raw_stream

    def _probe(self, call: Call, caller: torch.cuda.Stream, tensors: Any, work: Work) -> Work:
        call.stream = "group"
        if call.group.backend != "nccl" or self._wait_blocks or call.op == "barrier":
            # Waiting here would stop the host. The end is marked when the caller itself waits.
            return TimedWork(work, call, self, tensors)
        probe = self._streams["probe"]
        set_stream(probe)
        try:
            work.wait()
            call.end = self._clock.mark(probe)
        finally:
            set_stream(caller)
        timed = TimedWork(work, call, self, tensors)
        self._journal.in_flight(timed, call)
        return timed

    # -- waits --------------------------------------------------------------------------------

    def waiting(self, call: Call) -> None:
        step = self._journal.current
        if step is None or call.waited:
            return
        if current_raw_stream(self._device_index) == step.compute_raw_stream:
            call.waited = True
            step.waits.append(Wait(self._clock.mark(), call))

    def waited(self, call: Call) -> None:
        if call.end is None:
            call.end = self._clock.mark()

    def _why_untimed(self) -> str | None:
        if self._journal.current is None:
            return "outside of any step"
        return "captured into a graph" if is_capturing() else None


def _finished(work: Work | None, call: Call, done: Work) -> Work:
    """What an untimed call returns, as the process group would."""
    if work is None:
        return done
    if not call.is_async:
        work.wait()
        return done
    return work
