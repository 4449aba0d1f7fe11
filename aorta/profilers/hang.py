"""python -m aorta.profilers.hang"""

import sys

from aorta.hang.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
