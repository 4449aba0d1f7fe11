"""The training loop: from a Config to a trained model, records, checkpoints."""

from aorta.training.environment import AgreedError, Ranks, ranks_from_environment
from aorta.training.trainer import Summary, train

__all__ = ["AgreedError", "Ranks", "Summary", "ranks_from_environment", "train"]
