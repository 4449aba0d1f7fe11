"""python -m aorta.training: one rank of the training loop, as train.py."""

import sys

from aorta.training.command import main

if __name__ == "__main__":
    sys.exit(main(prog="aorta train"))
