"""python -m aorta.profilers.merge"""

import sys

from aorta.calibration.merge import main

if __name__ == "__main__":
    sys.exit(main())
