"""python -m aorta.profilers.merge: `aorta merge`."""

import sys

from aorta.cli import main

if __name__ == "__main__":
    main(["merge", *sys.argv[1:]])
