"""`aorta sweep` from a checkout that is not installed:

python scripts/sweep.py config/sweeps/fsdp_prefetch.yaml [--output DIR]
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

from aorta.cli import main  # noqa: E402

if __name__ == "__main__":
    main(["sweep", *sys.argv[1:]], prog_name="aorta")
