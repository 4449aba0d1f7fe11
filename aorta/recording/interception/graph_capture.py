"""Whether the caller's stream is being captured into a graph, where timing events have no place.

Asking the driver costs microseconds in a loop whose kernels have cleared the caches, once per collective and
wait. It is asked only while a capture is open, and captures are opened by one class of torch's. One that
somebody begins through the runtime itself is not noticed: its collectives are marked, the marks cannot be
read, and recording stops with a line in the log; the graph has none of it.
"""

import threading
from collections.abc import Callable
from typing import Any

from aorta.device.backend import accelerator
from aorta.recording.interception.replaced import ReplacedMethods


class CaptureWatch:
    """Counts the captures that are open in this process."""

    def __init__(self) -> None:
        self.num_open = 0
        self.listener: Callable[[int], None] | None = None
        """Told the number whenever it changes."""
        self._lock = threading.Lock()
        devices = accelerator()
        self._asks_driver = devices.is_capturing
        self._methods = None if devices.graph_type is None else ReplacedMethods(devices.graph_type)

    def is_capturing(self) -> bool:
        """Of the caller's current stream."""
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
