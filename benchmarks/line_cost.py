"""CPU time that a line takes its writer and its first reading, without columns beside it and with them.

python benchmarks/line_cost.py [--lines 8192] [--rounds 5] [--output FILE]

Lines without columns are what a training process on a CPU writes, lines with them what the second process of
a rank on a GPU does. The floor is a plain decode of every line by msgspec. Rounds in turn; microseconds a
line by the process's own clock, smallest and median.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from report_scale import decode_all, step_of

from aorta.records.files import steps_name
from aorta.records.schema import StepRecord
from aorta.records.writer import LineWriter
from aorta.report.load.rank.reduce import reduce_file

WHAT = ("write", "write with columns", "plain decode", "first reading", "first reading of lines alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for detail_every in (1, 100):
        rng = np.random.default_rng(0)
        records = [step_of(i, 8, 8, rng, i % detail_every == 0) for i in range(options.lines)]
        rounds = [one_round(records) for _ in range(options.rounds)]
        for what, of_what in zip(WHAT, zip(*rounds, strict=True), strict=True):
            row = {"detail_every": detail_every, "what": what, "least_us": min(of_what)}
            rows.append(row | {"median_us": statistics.median(of_what)})
            print(rows[-1], flush=True)
        reading = [of_round[3] / of_round[2] for of_round in rounds]
        rows.append({"detail_every": detail_every, "what": "first reading / plain decode", "rounds": reading})
        print(rows[-1], flush=True)
    if options.output:
        where = {"python": platform.python_version(), "load_average": os.getloadavg()[0]}
        options.output.write_text(
            json.dumps({**where, "date": time.strftime("%Y-%m-%d"), "lines": rows}, indent=2) + "\n"
        )


def one_round(records: list[StepRecord]) -> list[float]:
    """Microseconds a line, in the order of WHAT."""
    with tempfile.TemporaryDirectory() as folder:
        alone, path = Path(folder, "alone", steps_name(0)), Path(folder, "columns", steps_name(0))
        return [
            1e6 * cpu_s / len(records)
            for cpu_s in (
                timed(lambda: write(alone, records, with_columns=False)),
                timed(lambda: write(path, records, with_columns=True)),
                timed(lambda: decode_all([path], "plain")),
                timed(lambda: reduce_file(path)),
                timed(lambda: reduce_file(alone)),
            )
        ]


def timed(function: Callable[[], object]) -> float:
    start_s = time.process_time()
    function()
    return time.process_time() - start_s


def write(path: Path, records: list[StepRecord], with_columns: bool) -> None:
    path.parent.mkdir()
    LineWriter.create(path).close()
    with LineWriter.append(path, with_columns=with_columns) as writer:
        for record in records:
            writer.write(record)


if __name__ == "__main__":
    main()
