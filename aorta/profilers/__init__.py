"""The earlier names of `aorta merge` and `aorta hang`: python -m aorta.profilers.hang."""
