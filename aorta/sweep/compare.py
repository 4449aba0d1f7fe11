"""Two sweeps of training runs against each other; `aorta.hw_queue_eval compare` judges them the same way."""

from aorta.hw_queue_eval.core.compare_sweeps import compare_sweeps

__all__ = ["compare_sweeps"]
