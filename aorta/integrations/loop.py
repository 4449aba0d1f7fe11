"""A recorder for loops that tell of their steps by calls, as the callbacks of libraries do.

All integrations share it.
"""

from pathlib import Path
from typing import Any

from aorta.attach.instrument import instrument
from aorta.record import Recorder, StepHandle


class LibraryLoop:
    """Begins and ends the steps of one recorder. A call that makes no sense now is ignored: libraries leave
    loops by exceptions, and call back in orders of their own."""

    def __init__(self, output_dir: str | Path, settings: dict[str, Any]) -> None:
        self._output_dir = output_dir
        self._settings = settings
        self.recorder: Recorder | None = None
        self._step: StepHandle | None = None
        """The step that is open."""
        self._ended: StepHandle | None = None
        """The last step, while its window is open: logged scalars still belong to it."""

    def start(self) -> None:
        """Begin recording: the process group is there, and the loop begins."""
        if self.recorder is None:
            self.recorder = instrument(self._output_dir, **self._settings).__enter__()

    def step_begins(self, global_step: int) -> None:
        self.start()
        if self._step is None and self.recorder is not None:
            self._ended = None
            self._step = self.recorder.step(global_step=global_step)
            self._step.__enter__()

    def step_ends(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._ended, self._step = self._step, None

    def log(self, **scalars: Any) -> None:
        """Note scalars of the step that is open, or that ended last; None is left out."""
        step = self._step or self._ended
        if step is not None:
            step.log(**{name: value for name, value in scalars.items() if value is not None})

    def pause_begins(self) -> None:
        """Close the last step's window: what follows is no step, such as an evaluation or a checkpoint."""
        if self._ended is not None:
            self._ended.close_window()
            self._ended = None

    def close(self) -> None:
        """End the recording; a step that is open is dropped."""
        if self._step is not None:
            self._step.drop()
            self._step = None
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None
