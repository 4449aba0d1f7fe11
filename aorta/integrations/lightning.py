"""Lightning: Trainer(..., callbacks=[AortaCallback("artifacts")]), and Fabric with AortaFabricCallback."""

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from aorta.integrations.loop import LibraryLoop


class AortaCallback(Callback):  # type: ignore[misc]  # lightning may be missing where types are checked
    """Records each optimizer step of a Trainer; the batches of gradient accumulation are one step.

    output_dir and settings are those of aorta.instrument. A validation is in no step. The loss that
    training_step returns is logged.
    """

    def __init__(self, output_dir: str | Path = "artifacts", **settings: Any) -> None:
        self._loop = LibraryLoop(output_dir, settings)
        self._global_step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._loop.start()
        self._global_step = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._loop.step_begins(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._loop.log(loss=loss)
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._loop.step_ends()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._loop.pause_begins()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._loop.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._loop.close()


class AortaFabricCallback:
    """Records the steps of a loop that calls fabric.call("on_train_batch_start") and ..._end."""

    def __init__(self, output_dir: str | Path = "artifacts", **settings: Any) -> None:
        self._loop = LibraryLoop(output_dir, settings)
        self._num_steps = 0

    def on_train_batch_start(self, **_: Any) -> None:
        self._loop.step_begins(self._num_steps)

    def on_train_batch_end(self, loss: Any = None, **_: Any) -> None:
        self._loop.log(loss=loss)
        self._loop.step_ends()
        self._num_steps += 1

    def on_train_end(self, **_: Any) -> None:
        self._loop.close()
