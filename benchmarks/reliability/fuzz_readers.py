"""Many damaged inputs for each small reader of a run's folder, in one process: no crash, bounded memory.

    python benchmarks/reliability/fuzz_readers.py --number 100000 --output fuzz_readers.csv

The readers and what counts as a crash are those of tests/records/fuzzed_readers.py, and each trace format;
commands and checkpoints, which take longer, are in fuzz.py. Give a TMPDIR that is held in memory. Exit status
1 where a reader crashed or took more than --limit-mb.
"""

import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import arguments, write  # noqa: E402

from aorta.errors import AortaError  # noqa: E402
from tests.records.fuzzed_readers import READERS, fuzzed  # noqa: E402
from tests.traces.mutations import Mutations, load, mutated_bytes, mutated_json  # noqa: E402
from tests.traces.trace_writers import WRITERS  # noqa: E402


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--number", type=int, default=100_000, help="inputs of each reader")
    parser.add_argument("--seed", type=int, default=0)
    names = [*READERS, *(f"traces/{name}" for name in WRITERS)]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--limit-mb", type=float, default=500.0)
    parser.add_argument(
        "--total-s", type=float, default=float("inf"), help="no input after that, for each reader"
    )
    options = parser.parse_args()
    time.sleep = lambda seconds: None  # a reader looks again where a file is half written
    rows: list[dict[str, Any]] = []
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(of_reader(name, Path(folder), options))
        print(rows[-1], flush=True)
    write(options.output, rows)
    return 1 if any(row["crashed"] or row["peak_mb"] > options.limit_mb for row in rows) else 0


def of_reader(name: str, folder: Path, options: Any) -> dict[str, Any]:
    read = of_trace(name, folder, options) if name not in READERS else of_file(name, folder, options)
    counts = {"read": 0, "refused": 0, "crashed": 0}
    longest_s, began_s = 0.0, time.monotonic()
    for number in range(options.number):
        if time.monotonic() - began_s > options.total_s:
            break
        start_s = time.thread_time()
        try:
            counts[read(number)] += 1
        except Exception:
            counts["crashed"] += 1
            if counts["crashed"] <= 3:
                print(name, number, traceback.format_exc()[-600:], flush=True)
        longest_s = max(longest_s, time.thread_time() - start_s)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"reader": name, **counts, "longest_cpu_s": round(longest_s, 3), "peak_mb": round(peak_mb)}


def of_file(name: str, folder: Path, options: Any) -> Callable[[int], str]:
    good, rng = READERS[name].good, random.Random(f"{options.seed} {name}")
    is_json = good.startswith(b"{") and good.count(b"\n") < 1

    def read(number: int) -> str:
        return fuzzed(name, folder, (mutated_json if is_json and number % 2 else mutated_bytes)(good, rng))

    return read


def of_trace(name: str, folder: Path, options: Any) -> Callable[[int], str]:
    kind = name.removeprefix("traces/")
    supply = Mutations(folder, options.seed)
    supply._good = {kind: supply._good[kind]}

    def read(number: int) -> str:
        _, bad = supply.make(number)
        try:
            load(bad)
        except AortaError:
            return "refused"
        return "read"

    return read


if __name__ == "__main__":
    sys.exit(main())
