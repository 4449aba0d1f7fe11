"""Times collectives on CUDA and HIP by events, without waiting for the device.

A synchronous collective runs on the caller's stream, between two marks there. An asynchronous one runs on a
stream that torch keeps to itself: its end is marked on a "probe" stream that waits for it, or on the group's
own stream once GroupStreamFinder has found which one that is. In steps that kernel records time, calls are
only noted.
"""

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic_ns
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work

from aorta.device.backend import Backend
from aorta.device.event_clock import DeviceStream, EventClock, NamedStreams, Order
from aorta.record.group_stream import finder_of
from aorta.record.interception.stalls import BackwardWatch, CaptureWatch, current_graph_task
from aorta.record.interception.works import DoneWork, Launch, TimedWork
from aorta.record.journal import Journal
from aorta.steps.notes import CollectiveCall, Group, RecordedStep, Stall, StreamWait

logger = logging.getLogger(__name__)

_DEDICATED = {
    "all_reduce": "allreduce",
    "reduce_scatter": "reducescatter",
    "all_gather": "allgather",
    "all_to_all": "alltoall",
}
"""Operations that dedicated placement moves, and the name of the stream that each runs on."""
_ON_GROUP_STREAM = frozenset(
    ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
)
"""Operations that run on the one stream of their group. Sends and receives have one per peer, and a barrier
makes the host wait."""

# Why a call is not timed:
_OUTSIDE = "outside of any step"
_CAPTURED = "captured into a graph"


class EventObserver:
    """The observer of one accelerator's collectives, and of the waits for them.

    hang/standing.py reads the local `call` out of this file's frames, to show which collective a thread is
    in: each function that launches or waits for one has to name it so. It takes numbered calls only
    (`seq >= 0`, from add_call on). A call without marks is added before its launch, which may block. A call
    with marks is added after it: the launch of a kernel returns at once, the watchdog reads a call without a
    start as not started, and one whose launch raised need not be withdrawn. The price: a thread that hangs in
    such a launch (NCCL makes a communicator) is shown without its call.
    """

    def __init__(self, journal: Journal, dedicated: bool, captures: CaptureWatch) -> None:
        self._journal = journal
        self._dedicated_stream = _DEDICATED if dedicated else {}
        self._done_work = DoneWork()
        self._captures = captures
        # Set by attach, before the first step; until then nothing is timed.
        self._clock: EventClock
        self._backend: Backend
        self._collectives: str
        self._current_stream: Callable[[int], DeviceStream]
        self._current_raw_stream: Callable[[int], int]
        self._order: Order
        self._streams: NamedStreams
        self._backward: BackwardWatch
        self._device_index = 0
        # With NCCL_BLOCKING_WAIT a wait blocks the host, not the stream: the probe must not wait then.
        self._wait_blocks = any(
            os.environ.get(name, "0") not in ("", "0")
            for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
        )

    def attach(self, clock: EventClock) -> None:
        """Time the calls of the steps from now on: the device is known."""
        backend = clock.backend
        self._clock, self._backend, self._collectives = clock, backend, backend.collectives
        self._current_stream, self._current_raw_stream = backend.current_stream, backend.current_raw_stream
        self._order = Order(backend)
        self._streams = NamedStreams(clock.device, backend)
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
        """Launch a collective, timed by what times the open step; see Observer."""
        journal = self._journal
        noted_group = journal.group(group)
        call = CollectiveCall(noted_group, op, num_bytes, dtype, is_async, peer)
        step = journal.current
        if step is not None and not noted_group.placed:
            self._check_device(noted_group, tensors, step)
        if noted_group.coalescing is not None:
            # NCCL launches the group at its end: only then is there a time.
            noted_group.coalescing.append(call)
            if step is None or not step.by_kernels:
                noted_group.coalesced_tensors.append(tensors)
            return launch() or self._done_work
        if step is not None and step.by_kernels:
            return self._observe_by_kernels(call, step, launch)
        # The open captures are counted first, for asking the driver about this stream costs more.
        if step is None or step.untimed is not None or self._captures.num_open:
            call.reason = self._why_not(step)
            if step is None or call.reason is not None:
                return _work_of_untimed(self._launch_untimed(call, launch), call, self._done_work)
        if is_async:
            if not noted_group.sought:
                self._seek_stream(group, call)
            return self._launch_async(call, step, tensors, launch)
        name = self._dedicated_stream.get(op)
        if name is None:
            self._launch_in_place(call, step, launch)
        else:
            self._launch_on(name, call, step, launch)
        journal.add_call(call)  # with its marks; see the class
        return self._done_work

    def numbered_itself(self, group: ProcessGroup, num_calls: int) -> None:
        self._journal.group(group).num_internal += num_calls

    def coalescing_started(self, group: ProcessGroup) -> None:
        self._journal.coalescing_started(group)

    def coalescing_ended(self, group: ProcessGroup, launch: Launch) -> Work | None:
        """Launch a coalesced group, timed as one call."""
        work: Work | None
        step = self._journal.current
        noted_group = self._journal.group(group)
        tensors, noted_group.coalesced_tensors = noted_group.coalesced_tensors, []
        call = self._journal.coalescing_ended(group)
        if call is not None and step is not None and step.by_kernels:
            return self._launch_by_kernels(call, step, launch)
        if call is not None:
            call.reason = self._why_not(step)
            if call.reason is not None:
                return self._launch_untimed(call, launch)
        if call is None or step is None:
            work = launch()
            return work
        # NCCL launches the whole group here. It returns a work if the group is asynchronous.
        caller = self._current_stream(self._device_index)
        start = self._clock.mark(caller.stream)
        work = launch()
        call.launched_ns = monotonic_ns()
        call.is_async = work is not None
        call.start = start
        if work is None:
            self._ended_in_place(call, step, caller)
        else:
            call.on_compute = caller.raw == step.compute_raw_stream
        self._journal.add_call(call)
        return None if work is None else self._mark_end_on_probe(call, caller, tensors, work)

    # -- every step, whatever times it -------------------------------------------------------------

    def _launch_untimed(self, call: CollectiveCall, launch: Launch) -> Work | None:
        """Launch a call that gets no marks: it has no times, or kernel records have them."""
        self._journal.add_call(call)  # before the launch, so that a watchdog can name a call that blocks
        try:
            work: Work | None = launch()
        except BaseException:
            self._journal.withdraw_call(call)
            raise
        call.launched_ns = monotonic_ns()
        return work

    def _why_not(self, step: RecordedStep | None) -> str | None:
        """Say why a call is not timed now; None: it is."""
        if step is None:
            return _OUTSIDE
        if step.untimed is not None:
            return step.untimed
        return _CAPTURED if self._captures.is_capturing() else None

    def _check_device(self, group: Group, tensors: Any, step: RecordedStep) -> None:
        """Check at a group's first call that its tensors are on the recorder's device, which is current.

        A script may name its device in every call and leave the current one at cuda:0. Marks there would tell
        of an idle device, and switching to a stream of ours and back would change the current device.
        """
        tensor = _first_tensor(tensors)
        if tensor is None:  # a barrier
            return
        index = self._backend.index_of(tensor)
        group.placed = True
        current, name = self._backend.current_index(), self._backend.torch_type
        if not index == current == self._device_index:
            reason = (
                f"collectives run on {name}:{index}, the current device is {name}:{current} and the "
                f"recorder's {name}:{self._device_index}: call torch.{name}.set_device({index}) before "
                "the first step"
            )
            step.untimed = reason
            if step.by_kernels:
                step.kernels_lost = reason
            if self._journal.away is None:
                logger.warning("aorta: nothing is timed: %s", reason)
            self._journal.away = reason

    # -- steps that kernel records time ------------------------------------------------------------

    def _observe_by_kernels(self, call: CollectiveCall, step: RecordedStep, launch: Launch) -> Work:
        """Launch a call and note when. Returns the process group's own work, unwrapped."""
        name = None if call.is_async else self._dedicated_stream.get(call.op)
        if name is not None and not self._captures.num_open:
            self._journal.add_call(call)
            self._move_to(name, call, launch)
            return self._done_work
        work = self._launch_by_kernels(call, step, launch)
        if work is None:
            return self._done_work
        if not call.is_async:
            work.wait()
            return self._done_work
        return work

    def _launch_by_kernels(self, call: CollectiveCall, step: RecordedStep, launch: Launch) -> Work | None:
        """Launch a call, with the host's time before and after. Returns what the launch returned."""
        if self._captures.num_open and self._captures.is_capturing():
            call.reason = _CAPTURED
        caller = self._current_raw_stream(self._device_index)
        call.stream = "group" if call.is_async else "compute" if caller == step.compute_raw_stream else "side"
        call.issued_ns = monotonic_ns()
        return self._launch_untimed(call, launch)

    def _move_to(self, name: str, call: CollectiveCall, launch: Launch) -> None:
        """Run a synchronous call on the stream of its name, ordered as it would be on the caller's."""
        caller, dedicated = self._current_stream(self._device_index), self._streams[name]
        self._order(caller, dedicated)
        dedicated.make_current()
        call.stream = name
        call.issued_ns = monotonic_ns()
        try:
            work = launch()
            call.launched_ns = monotonic_ns()
            if work is not None:
                work.wait()
        except BaseException:
            self._journal.withdraw_call(call)
            raise
        finally:
            caller.make_current()
        self._order(dedicated, caller)

    # -- steps that events time --------------------------------------------------------------------

    def _launch_async(self, call: CollectiveCall, step: RecordedStep, tensors: Any, launch: Launch) -> Work:
        """Launch an asynchronous call; its start is marked on the caller's stream, its end where it runs."""
        task = current_graph_task()
        if task != -1:
            self._backward.async_call(task)
        caller = self._current_stream(self._device_index)
        start = self._clock.mark(caller.stream)
        work = launch()
        call.launched_ns = monotonic_ns()
        call.start = start
        if work is None:
            self._ended_in_place(call, step, caller)
            self._journal.add_call(call)
            return self._done_work
        call.on_compute = caller.raw == step.compute_raw_stream
        self._journal.add_call(call)
        group_stream = call.group.own_stream
        if group_stream is None or call.op not in _ON_GROUP_STREAM:
            return self._mark_end_on_probe(call, caller, tensors, work)
        call.stream = "group"
        call.end = self._clock.mark(group_stream.stream)
        return TimedWork(work, call, self, None)  # nothing waited for the real work, so it keeps the tensors

    def _seek_stream(self, group: ProcessGroup, call: CollectiveCall) -> None:
        """Begin to look for the stream of the group's collectives."""
        if call.op not in _ON_GROUP_STREAM:
            return
        noted_group = call.group
        noted_group.sought = True
        if self._may_probe(call):

            def begin() -> None:
                noted_group.finder = finder_of(group, self._clock, [self._streams["probe"]])

            self._search(noted_group, begin)

    @staticmethod
    def _search(group: Group, act: Callable[[], None]) -> None:
        """Do a part of the search. What goes wrong in it ends the search, and never a step of training."""
        try:
            act()
        except (RuntimeError, ValueError, IndexError, AttributeError) as error:
            group.finder = None
            logger.info("the stream of group %s is not sought any more: %s", group.name, error)

    def _may_probe(self, call: CollectiveCall) -> bool:
        """True if the probe stream may wait for this call: with NCCL the host goes on meanwhile."""
        return call.group.backend == self._collectives and not self._wait_blocks and call.op != "barrier"

    @staticmethod
    def _conclude(group: Group) -> None:
        """Keep the stream that the search has found; drop a search that has ended."""
        finder = group.finder
        if finder is None or not (finder.given_up or finder.stream is not None):
            return
        if finder.stream is not None and not finder.given_up:
            group.own_stream = finder.stream
        group.finder = None

    def _launch_in_place(self, call: CollectiveCall, step: RecordedStep, launch: Launch) -> None:
        """Launch a synchronous call and time it on the caller's stream."""
        caller = self._current_stream(self._device_index)
        call.start = self._clock.mark(caller.stream)
        work = launch()
        call.launched_ns = monotonic_ns()
        if work is not None:
            work.wait()
        self._ended_in_place(call, step, caller)

    def _ended_in_place(self, call: CollectiveCall, step: RecordedStep, caller: DeviceStream) -> None:
        """Mark the end of a call that was queued on the caller's stream, which stands still meanwhile."""
        call.end = self._clock.mark(caller.stream)
        if caller.raw == step.compute_raw_stream:
            call.on_compute = call.blocks = True
            call.stream = "compute"
        else:
            call.stream = "side"

    def _launch_on(self, name: str, call: CollectiveCall, step: RecordedStep, launch: Launch) -> None:
        """Launch a synchronous call on the stream of its name, ordered as on the caller's, and time it."""
        caller, dedicated = self._current_stream(self._device_index), self._streams[name]
        mark = self._clock.mark
        start = mark(caller.stream)
        self._order(caller, dedicated)  # the inputs were written by the caller
        dedicated.make_current()
        try:
            work = launch()
            call.launched_ns = monotonic_ns()
            if work is not None:
                work.wait()
            end = mark(dedicated.stream)
        finally:
            caller.make_current()
        # The caller goes on after the collective, as after a synchronous call on its own stream.
        self._order(dedicated, caller)
        call.start, call.end = start, end
        call.on_compute = call.blocks = caller.raw == step.compute_raw_stream
        call.stream = name

    def _mark_end_on_probe(
        self, call: CollectiveCall, caller: DeviceStream, tensors: Any, work: Work
    ) -> Work:
        """Mark the end of an asynchronous call on a stream of ours that waits for it."""
        call.stream = "group"
        if not self._may_probe(call) or _has_hidden_inputs(call, tensors):
            # Waiting here would stop the host, or free memory too early: the caller's wait marks the end.
            return TimedWork(work, call, self, tensors)
        finder = call.group.finder if call.op in _ON_GROUP_STREAM else None
        if finder is not None:
            self._search(call.group, lambda: finder.look(work, caller.raw))
        probe = self._streams["probe"]
        probe.make_current()  # wait() makes the current stream follow the work, and not the host
        try:
            work.wait()
            call.end = self._clock.mark(probe.stream)
        finally:
            caller.make_current()
        if finder is not None:
            self._search(call.group, lambda: finder.check(probe.stream))
            self._conclude(call.group)
        timed = TimedWork(work, call, self, tensors)  # waiting made the real work drop the tensors
        self._journal.in_flight(timed.in_flight)
        return timed

    # -- waits --------------------------------------------------------------------------------

    def wait(self, call: CollectiveCall, wait: Callable[..., Any], *timeout: timedelta) -> Any:
        """Let the caller's stream wait for the call; note that if it is the compute stream."""
        step = self._journal.current
        if step is not None and step.untimed is None and not call.waited:
            caller = self._current_stream(self._device_index)
            if caller.raw == step.compute_raw_stream:
                call.waited = True
                step.waits.append(StreamWait(self._clock.mark(caller.stream), call.id))
        result = wait(*timeout)
        if call.end is None:
            call.end = self._clock.mark()
        return result

    def wait_beyond(self, calls: Sequence[CollectiveCall], wait: Callable[..., Any]) -> Any:
        """Let the stream wait for a future that follows these calls and perhaps more; note a stall."""
        step = self._journal.current
        start = caller = None
        if step is not None and step.untimed is None and not self._captures.is_capturing():
            caller = self._current_stream(self._device_index)
            if caller.raw == step.compute_raw_stream:
                start = self._clock.mark(caller.stream)
        result = wait()
        for call in calls:
            if call.end is None:
                call.end = self._clock.mark()
        if step is not None and caller is not None and start is not None:
            step.stalls.append(Stall(start, self._clock.mark(caller.stream)))
            for call in calls:
                call.waited = True
        return result

    def lost(self, calls: Sequence[CollectiveCall]) -> None:
        self._journal.lost_futures(calls)


def _work_of_untimed(work: Work | None, call: CollectiveCall, done_work: Work) -> Work:
    """Return what the caller of an untimed call gets; a synchronous one is waited for here."""
    if work is None:
        return done_work
    if not call.is_async:
        work.wait()
        return done_work
    return work


def _has_hidden_inputs(call: CollectiveCall, tensors: Any) -> bool:
    """True for a list reduce-scatter, which reads a copy of its inputs that only the work keeps.

    The work drops it at the first wait; if that was ours, the allocator would give it away too early.
    """
    is_pair = call.op == "reduce_scatter" and isinstance(tensors, list | tuple) and len(tensors) > 0
    return is_pair and isinstance(tensors[0], list | tuple)


def _first_tensor(tensors: Any) -> Tensor | None:
    """Return the first tensor in nested lists of them; None where there is none."""
    while isinstance(tensors, list | tuple):
        if not tensors:
            return None
        tensors = tensors[0]
    first: Tensor = tensors
    return first
