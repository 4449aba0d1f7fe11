"""The training loop: from a Config to a trained model, records, checkpoints."""

from aorta.training.setup import AgreedError
from aorta.training.trainer import Summary, train

__all__ = ["AgreedError", "Summary", "train"]
