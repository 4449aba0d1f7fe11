"""Damaged and hostile traces of every format: each must give a run or one clear line, in time.

python benchmarks/fuzz_traces.py [--number 10000] [--seed 0] [--limit-s 20]

Exits 1 and keeps the folder of the first trace that gave anything else.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.traces.mutations import Mutations, load, outcome  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="folder for what failed (else a temporary one)")
    args = parser.parse_args()

    signal.signal(signal.SIGALRM, _too_long)
    warnings.simplefilter("error")  # an overflow that numpy warns of is a wrong number
    counts: Counter[tuple[str, bool]] = Counter()
    failures: Counter[str] = Counter()
    slowest = 0.0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        mutations = Mutations(Path(place), args.seed)
        for number in range(args.number):
            name, folder = mutations.make(number)
            start = time.perf_counter()
            signal.alarm(args.limit_s)
            try:
                counts[name, outcome(partial(load, folder)) == "read"] += 1
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                kind = f"{name}: {type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {error}"[
                    :200
                ]
                if kind not in failures:
                    kept = (args.keep or Path(tempfile.mkdtemp())) / f"{name}-{number}"
                    shutil.copytree(folder, kept)
                    print(f"{kind}\n    {kept}", flush=True)
                failures[kind] += 1
            finally:
                signal.alarm(0)
            slowest = max(slowest, time.perf_counter() - start)
    for name in sorted({name for name, _ in counts}):
        print(f"{name:18} read {counts[name, True]:6}   refused in one line {counts[name, False]:6}")
    wall_s = time.perf_counter() - began
    print(f"{args.number} traces in {wall_s:.0f} s, the slowest {slowest:.2f} s, failures {failures.total()}")
    return 1 if failures else 0


def _too_long(*_: object) -> None:
    raise TimeoutError("it takes too long")


if __name__ == "__main__":
    sys.exit(main())
