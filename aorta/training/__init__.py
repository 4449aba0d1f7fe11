"""The training loop: from a Config to a trained model, records, checkpoints."""

from aorta.training.environment import Ranks, ranks_from_environment
from aorta.training.trainer import Summary, train

__all__ = ["Ranks", "Summary", "ranks_from_environment", "train"]
