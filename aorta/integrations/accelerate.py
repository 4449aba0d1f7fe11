"""accelerate: recording = record(accelerator, "artifacts"), and `with recording.step():` around an update.

recording = aorta.integrations.accelerate.record(accelerator, "artifacts")
for batch in loader:
    with accelerator.accumulate(model), recording.step() as step:
        ...
recording.close()
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aorta.integrations.loop import LibraryLoop


def record(accelerator: Any, output_dir: str | Path = "artifacts", **settings: Any) -> "AccelerateRecording":
    """Record the loop that this accelerator serves. settings: those of aorta.instrument."""
    return AccelerateRecording(accelerator, LibraryLoop(output_dir, settings))


class AccelerateRecording:
    """Steps of a loop with an Accelerator; micro-batches of accumulation are one step."""

    def __init__(self, accelerator: Any, loop: LibraryLoop) -> None:
        self._accelerator = accelerator
        self._loop = loop
        self._num_steps = 0
        loop.start()

    @contextmanager
    def step(self) -> "Iterator[LibraryLoop]":
        """Enclose one micro-batch; the step ends with the one that updates the parameters."""
        self._loop.step_begins(self._num_steps)
        yield self._loop
        if self._accelerator.sync_gradients:
            self._loop.step_ends()
            self._num_steps += 1

    def close(self) -> None:
        """End the recording, after the loop."""
        self._loop.close()
