"""Where the compute stream is told to wait for something other than a Work.

Waits on events and streams pass through two Python methods of torch.cuda. DDP's reducer waits in
C++ at the end of backward, in a callback of the autograd engine; a callback queued before its
own and one queued from within that callback bracket it.
"""

from typing import Any

import torch

from aorta.device.cuda import current_stream, is_capturing
from aorta.device.cuda import wait_event as wait_for_event
from aorta.device.marks import MarkClock
from aorta.recording.calls import FinalWait, Stall
from aorta.recording.journal import Journal


class StreamWaitPatch:
    """Notes when the compute stream is told to wait for an event or a stream.

    torch.Stream's own wait methods (not torch.cuda.Stream's) cannot be replaced and are not seen.
    """

    def __init__(self, journal: Journal, clock: MarkClock, device_index: int) -> None:
        self._journal = journal
        self._clock = clock
        self._device_index = device_index
        self._originals: tuple[Any, Any] | None = None

    def install(self) -> None:
        event_wait = torch.cuda.Event.wait
        stream_wait_event = torch.cuda.Stream.wait_event
        self._originals = (event_wait, stream_wait_event)
        journal, mark, current_device = self._journal, self._clock.mark, torch.cuda.current_device
        plain_event = torch.cuda.Event
        device_index = self._device_index
        # Past torch's own Python method; somebody else's replacement of it is called.
        order = wait_for_event if event_wait.__module__ == torch.cuda.streams.__name__ else event_wait

        def wait(self: torch.cuda.Event, stream: Any = None) -> None:
            step = journal.current
            if step is None:
                return event_wait(self, stream)
            if stream is None:
                stream = current_stream(current_device()).stream
            # The default streams of all devices have one handle.
            elsewhere = stream.cuda_stream != step.compute_raw_stream or stream.device_index != device_index
            if elsewhere or is_capturing():
                return event_wait(self, stream)
            before = mark(stream)
            order(self, stream)
            step.stalls.append(Stall(before, mark(stream)))
            return None

        def wait_event(self: torch.cuda.Stream, event: Any) -> None:
            step = journal.current
            if step is None or self.cuda_stream != step.compute_raw_stream or is_capturing():
                return stream_wait_event(self, event)
            if self.device_index != device_index:
                return stream_wait_event(self, event)
            if type(event) is plain_event:
                before = mark(self)
                order(event, self)
            elif isinstance(event, plain_event):
                return stream_wait_event(self, event)  # ends in Event.wait, noted there
            else:
                before = mark(self)
                stream_wait_event(self, event)
            step.stalls.append(Stall(before, mark(self)))
            return None

        torch.cuda.Event.wait = wait  # type: ignore[method-assign]
        torch.cuda.Stream.wait_event = wait_event  # type: ignore[method-assign]

    def uninstall(self) -> None:
        if self._originals is not None:
            torch.cuda.Event.wait, torch.cuda.Stream.wait_event = self._originals  # type: ignore[method-assign]
            self._originals = None


current_graph_task = torch._C._current_graph_task_id
"""The pass of the autograd engine that this thread works for, -1 outside of one."""


class BackwardWatch:
    """Brackets what C++ waits for at the end of a backward pass."""

    def __init__(self, journal: Journal, clock: MarkClock) -> None:
        self._journal = journal
        self._clock = clock
        self._graph_task = -1

    def async_call(self, task: int) -> None:
        """An asynchronous call was issued; if that was inside backward, watch the end of this pass.

        task: current_graph_task().
        """
        if task == -1 or task == self._graph_task:
            return
        self._graph_task = task
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        step = self._journal.current
        if step is None:
            return
        calls = [call for call in step.calls if call.future_taken and not call.waited]
        if not calls:
            return
        wait = FinalWait(self._clock.mark(), calls)
        step.final_waits.append(wait)

        def others_waited() -> None:
            wait.after = self._clock.mark()
            for call in calls:
                call.waited = True

        # Runs after the callbacks that are queued by now, DDP's among them.
        torch.autograd.Variable._execution_engine.queue_callback(others_waited)
