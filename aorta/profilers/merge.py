"""python -m aorta.profilers.merge"""

import sys

from aorta.merge.command import main

if __name__ == "__main__":
    sys.exit(main())
