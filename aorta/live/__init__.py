"""A running job from its folder: the newest lines of its ranks, read as they are written. No torch."""
