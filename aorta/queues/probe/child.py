"""One probe in a process of its own: `python -m aorta.queues.probe.child`. JSON on stdout.

The number of queues is fixed when the runtime starts, so that every setting needs a fresh process.
"""

import argparse
import sys

import msgspec
import torch

from aorta.errors import AortaError
from aorta.queues.probe.probe import PARTS, probe


def main() -> None:
    parser = argparse.ArgumentParser(description="Probe one GPU; print JSON.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--parts", nargs="+", default=["queues", "sharing"], choices=PARTS)
    arguments = parser.parse_args()
    try:
        result = probe(torch.device(arguments.device), arguments.streams, arguments.parts)
    except AortaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main()
