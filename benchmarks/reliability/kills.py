"""SIGKILL at a random moment of a recorded run on a CPU: which closed steps are lost?

    python benchmarks/reliability/kills.py --trials 20 --output kills.csv

The run says on its standard output which step it has begun; every step before that one was closed, and the
report has to have it. Exit status 1 where one is missing.
"""

import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import arguments, write  # noqa: E402

from aorta.account.load.open import load_run  # noqa: E402

SCRIPT = """
import os, sys, time, aorta
with aorta.instrument(sys.argv[1]) as recorder:
    for number in range(1_000_000):
        with recorder.step() as step:
            os.write(1, b"%d\\n" % number)
            step.log(loss=1.0)
            time.sleep(0.0005 * (number % 5))
"""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--trials", type=int, default=20)
    options = parser.parse_args()
    rows = [trial(number) for number in range(options.trials)]
    num_lost = sum(row["lost"] for row in rows)
    print(f"{len(rows)} trials, {num_lost} closed steps lost, "
          f"{sum('killed' in row['story'] for row in rows)} reports begin with the kill")  # fmt: skip
    write(options.output, rows)
    return 1 if num_lost else 0


def trial(number: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder)], stdout=subprocess.PIPE, cwd=ROOT
        )
        assert process.stdout is not None
        begun = int(process.stdout.readline())
        time.sleep(random.Random(number).uniform(0.02, 0.6))
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().splitlines()
        process.wait()
        begun = int(rest[-1]) if rest else begun
        run = load_run(folder, "killed")
        missing = set(range(begun)) - set(run.global_step.tolist())
        return {"trial": number, "begun": begun, "lost": len(missing), "story": " ".join(run.story)}


if __name__ == "__main__":
    sys.exit(main())
