"""Waits of the compute stream for something other than a Work: events, streams, the end of a backward pass.

Also watches captures of graphs, in which nothing may be marked.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from aorta.device.backend import accelerator
from aorta.device.marks import MarkClock
from aorta.record.interception.replaced import ReplacedMethods, uncompiled
from aorta.record.journal import Journal
from aorta.steps.notes import FinalWait, RecordedStep, Stall

ASK_EVERY = 8
"""In one step of so many, every event that the compute stream waits for is asked whether it has passed."""
current_graph_task = torch._C._current_graph_task_id
"""Returns the pass of the autograd engine that this thread works for, -1 outside of one."""


class StreamWaitPatch:
    """Notes when the compute stream is told to wait for an event or a stream.

    torch.Stream's own wait methods (not those of the device's class) cannot be replaced and are not seen.
    """

    def __init__(
        self, journal: Journal, clock: MarkClock, device_index: int, captures: "CaptureWatch"
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._device_index = device_index
        self._captures = captures
        self._devices = accelerator()
        self._is_on = False
        self._events = ReplacedMethods(self._devices.event_type)
        self._streams = ReplacedMethods(self._devices.stream_type)

    def install(self) -> None:
        """Replace Event.wait and Stream.wait_event, once; what they use is looked up here."""
        if self._is_on:
            return
        self._is_on = True
        devices = self._devices
        plain_event = devices.event_type
        event_wait = plain_event.wait
        stream_wait_event = devices.stream_type.wait_event
        journal, mark = self._journal, self._clock.mark
        current_stream, current_index, handle_of = (
            devices.current_stream,
            devices.current_index,
            devices.handle_of,
        )
        passing: set[int] = set()  # places in the step whose events had passed when last asked
        device_index, is_capturing = self._device_index, self._captures.is_capturing
        # torch's own Python method is left out, which saves time; another tool's replacement of it is called.
        order = devices.wait_event if event_wait.__module__ == devices.event_wait_module else event_wait

        def is_compute(stream: Any, step: RecordedStep) -> bool:
            """True if a wait of this stream is noted."""
            if step.untimed is not None or step.by_kernels or handle_of(stream) != step.compute_raw_stream:
                return False
            # The default streams of all devices have one handle. A captured wait stalls nothing now.
            return stream.device_index == device_index and not is_capturing()

        def stand_still(
            stream: Any, event: Any, step: RecordedStep, follow: Callable[[Any, Any], Any]
        ) -> None:
            """Let the compute stream follow the event, and note the stall."""
            start = mark(stream)
            # Asked after the mark: an event that has passed by now stops nothing, and one mark is both ends.
            # Most waits are like this where the host is the bottleneck. Elsewhere the question is wasted, so
            # only places are asked at which the event had passed before.
            place = len(step.stalls)
            asks = place in passing or step.global_step % ASK_EVERY == 0
            passed = asks and has_passed(event)
            if asks:
                (passing.add if passed else passing.discard)(place)
            follow(event, stream)
            step.stalls.append(Stall(start, start if passed else mark(stream)))

        def wait(self: Any, stream: Any = None) -> Any:
            step = journal.current
            if step is None:
                return event_wait(self, stream)
            if stream is None:
                stream = current_stream(current_index()).stream
            if is_compute(stream, step):
                return stand_still(stream, self, step, order)
            return order(self, stream)

        def wait_event(self: Any, event: Any) -> Any:
            step = journal.current
            if step is None:
                return stream_wait_event(self, event)
            if type(event) is plain_event:
                follow = order
            elif isinstance(event, plain_event):
                return stream_wait_event(self, event)  # ends in Event.wait, noted there
            else:
                follow = by_stream
            if is_compute(self, step):
                return stand_still(self, event, step, follow)
            return follow(event, self)

        def by_stream(event: Any, stream: Any) -> None:
            stream_wait_event(stream, event)

        self._events.replace("wait", lambda _: wait)
        self._streams.replace("wait_event", lambda _: wait_event)

    def uninstall(self) -> None:
        self._is_on = False
        self._events.restore()
        self._streams.restore()


def has_passed(event: Any) -> bool:
    """True once all work before the event is done. Never blocks; False where nobody can say."""
    try:
        passed: bool = event.query()
    except RuntimeError:  # recorded in a capture that this stream is about to join
        return False
    return passed


class BackwardWatch:
    """Marks the time in which C++ waits for futures at the end of a backward pass, as DDP's reducer does."""

    def __init__(self, journal: Journal, clock: MarkClock) -> None:
        self._journal = journal
        self._clock = clock
        self._graph_task = -1

    def async_call(self, task: int) -> None:
        """Watch the end of the backward pass in which an asynchronous call was issued.

        task: current_graph_task(); -1: it was issued outside of one, and nothing is done.
        """
        if task == -1 or task == self._graph_task:
            return
        self._graph_task = task
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    @uncompiled
    def _backward_ended(self) -> None:
        """Bracket the callbacks that autograd runs at the end of the pass: in these C++ waits."""
        step = self._journal.current
        if step is None:
            return
        calls = [
            call for call in step.calls if call.future_taken and not (call.waited or call.backward_waited)
        ]
        if not calls:
            return
        wait = FinalWait(self._clock.mark(), [call.id for call in calls])
        step.final_waits.append(wait)

        @uncompiled
        def others_waited() -> None:
            end = wait.end = self._clock.mark()
            for call in calls:
                call.backward_waited = True
                if call.end is None and not self._clock.is_device:
                    call.end = end  # its own thread is about to say so, a little later

        # Runs after the callbacks that are queued by now, DDP's among them.
        torch.autograd.Variable._execution_engine.queue_callback(others_waited)


class CaptureWatch:
    """Counts the captures of graphs that are open in this process."""

    def __init__(self) -> None:
        self.num_open = 0
        self._lock = threading.Lock()
        devices = accelerator()
        self._asks_driver = devices.is_capturing
        self._methods = None if devices.graph_type is None else ReplacedMethods(devices.graph_type)

    def is_capturing(self) -> bool:
        """True while the caller's current stream is captured."""
        return self.num_open > 0 and self._asks_driver()

    def install(self) -> None:
        if self._methods is not None:
            self._methods.replace("capture_begin", self._opening)
            self._methods.replace("capture_end", self._closing)

    def uninstall(self) -> None:
        if self._methods is not None:
            self._methods.restore()
        self.num_open = 0

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(graph: Any, *args: Any, **named: Any) -> Any:
            self._add(1)  # before it begins, for the first captured call has to know
            try:
                return original(graph, *args, **named)
            except BaseException:
                self._add(-1)
                raise

        return capture_begin

    def _closing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_end(graph: Any, *args: Any, **named: Any) -> Any:
            try:
                return original(graph, *args, **named)
            finally:
                self._add(-1)

        return capture_end

    def _add(self, num: int) -> None:
        with self._lock:
            self.num_open = max(0, self.num_open + num)
