"""Whether the caller's stream is being captured into a graph, where timing events have no place.

Asking the driver costs microseconds in a loop whose kernels have cleared the caches, once per collective and
wait. It is asked only while a capture is open, and captures are opened by torch.cuda.CUDAGraph. One that
somebody begins through the runtime itself is not noticed: its collectives are marked, the marks cannot be
read, and recording stops with a line in the log; the graph has none of it.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from aorta.device.cuda import is_capturing
from aorta.recording.interception.replaced import ReplacedMethods


class CaptureWatch:
    """Counts the captures that are open in this process."""

    def __init__(self) -> None:
        self.num_open = 0
        self.listener: Callable[[int], None] | None = None
        """Told the number whenever it changes."""
        self._lock = threading.Lock()
        self._methods = ReplacedMethods(torch.cuda.CUDAGraph)

    def is_capturing(self) -> bool:
        """Of the caller's current stream."""
        return self.num_open > 0 and is_capturing()

    def install(self) -> None:
        self._methods.replace("capture_begin", self._opening)
        self._methods.replace("capture_end", self._closing)

    def uninstall(self) -> None:
        self._methods.restore()
        self.num_open = 0

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(graph: Any, *args: Any, **named: Any) -> Any:
            self._add(1)  # before: from the first captured call on it has to be known
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
            if self.listener is not None:
                self.listener(self.num_open)
