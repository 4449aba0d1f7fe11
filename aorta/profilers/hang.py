"""python -m aorta.profilers.hang: `aorta hang`."""

import sys

from aorta.cli import main

if __name__ == "__main__":
    main(["hang", *sys.argv[1:]])
