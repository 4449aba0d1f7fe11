"""Trainer of transformers: Trainer(..., callbacks=[AortaCallback("artifacts")])."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from aorta.integrations.loop import LibraryLoop


class AortaCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Records each optimizer step of a Trainer, with the loss, learning rate and gradient norm that it logs.

    output_dir and settings are those of aorta.instrument. An evaluation is in no step.
    """

    def __init__(self, output_dir: str | Path = "artifacts", **settings: Any) -> None:
        self._loop = LibraryLoop(output_dir, settings)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._loop.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._loop.step_begins(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._loop.step_ends()
        if not control.should_log:
            self._pause(control)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        logs = logs or {}
        self._loop.log(loss=logs.get("loss"), lr=logs.get("learning_rate"), grad_norm=logs.get("grad_norm"))
        self._pause(control)  # what the Trainer does after logging

    def _pause(self, control: Any) -> None:
        if control.should_evaluate or control.should_save:
            self._loop.pause_begins()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._loop.close()
