"""The folder of a run from the side of the training process."""
