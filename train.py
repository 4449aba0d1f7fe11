"""Train a small decoder and record where its steps lose time: `aorta train`, for torchrun.

torchrun --nproc_per_node 2 train.py --config config/fsdp.yaml --override training.max_steps=50
"""

import sys

from aorta.training.command import main

if __name__ == "__main__":
    sys.exit(main(prog="train.py"))
