"""CUDA graphs: what was captured into each, and when each is replayed."""

from collections.abc import Callable
from typing import Any

import torch

from aorta.record.interception.replaced import ReplacedMethods

Entries = list[list[Any]]


class Graphs:
    """Sees captures and replays as long as it is installed. Keeps the log of each capture."""

    def __init__(
        self,
        begin: Callable[[], bool],
        end: Callable[[], Entries],
        replayed: Callable[[int, Callable[[], Any]], Any],
    ) -> None:
        """begin: called before a capture, true if it will be logged. end: called after it, returns its log.

        replayed: called with a graph's id and what replays it.
        """
        self._begin, self._end, self._replayed = begin, end, replayed
        self._methods = ReplacedMethods(torch.cuda.CUDAGraph)
        self.captured: dict[int, Entries] = {}
        self._is_logged = False

    def install(self) -> None:
        self._methods.replace("capture_begin", self._capture_begin)
        self._methods.replace("capture_end", self._capture_end)
        self._methods.replace("replay", self._replay)

    def uninstall(self) -> None:
        self._methods.restore()

    def _capture_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._is_logged = self._begin()
            return original(graph, *args, **kwargs)

        return capture_begin

    def _capture_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_end(graph: Any) -> Any:
            result = original(graph)
            if self._is_logged:
                self.captured[id(graph)] = self._end()
                self._is_logged = False
            return result

        return capture_end

    def _replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def replay(graph: Any) -> Any:
            return self._replayed(id(graph), lambda: original(graph))

        return replay
