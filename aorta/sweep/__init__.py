"""Runs of a command under several variants: two in turn (`aorta ab`), or a matrix (`aorta sweep`)."""
