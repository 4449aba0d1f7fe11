"""torchtitan: records from a module of your own that --experimental.custom_import names:

from aorta.integrations.torchtitan import record

record("artifacts")
"""

import functools
from pathlib import Path
from typing import Any

from aorta.integrations.loop import LibraryLoop


def record(output_dir: str | Path = "artifacts", **settings: Any) -> LibraryLoop:
    """Record every train_step of torchtitan's Trainer from now on. settings: those of aorta.instrument."""
    from torchtitan.train import Trainer

    loop = LibraryLoop(output_dir, settings)
    train, train_step = Trainer.train, Trainer.train_step

    @functools.wraps(train)
    def recorded_train(self: Any, *args: Any, **named: Any) -> Any:
        loop.start()
        try:
            return train(self, *args, **named)
        finally:
            loop.close()

    @functools.wraps(train_step)
    def recorded_step(self: Any, *args: Any, **named: Any) -> Any:
        loop.step_begins(self.step)
        result = train_step(self, *args, **named)
        loop.step_ends()
        return result

    Trainer.train, Trainer.train_step = recorded_train, recorded_step
    return loop
