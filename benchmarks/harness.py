"""Parts that every harness shares: its command line and the CSV that it writes.

A harness ends with `write(options.output, rows)`: one row a case, nested figures in columns of their own.
"""

import argparse
import csv
import importlib
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOST_VALUES = 8
"""A longer list of numbers is written as its median."""


def arguments(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser whose help is the harness's own text, with --output for the CSV."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter, **options)
    parser.add_argument("--output", type=Path, metavar="FILE.csv", help="where the table goes")
    return parser


def choose(doc: str | None, parts: Mapping[str, Callable[[], int | None]]) -> int | None:
    """Run the part that the first argument names; the first part where it names none.

    A part reads the arguments behind its name from sys.argv, so that it could be a script of its own.
    """
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first in ("-h", "--help"):
        names = ", ".join(parts)
        print(f"{(doc or '').strip()}\n\nparts: {names}; PART --help has the options of one")
        return 0
    if first in parts:
        sys.argv[0:2] = [sys.argv[0]]
        return parts[first]()
    return next(iter(parts.values()))()


def part_of(module: str, function: str) -> Callable[[], int | None]:
    """A part of another module, which is imported when the part runs."""
    return lambda: getattr(importlib.import_module(module), function)()


def write(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows as CSV; does nothing without a path."""
    if path is None:
        return
    flat = [dict(flattened(row)) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
    print(f"{path}: {len(rows)} rows; {machine()}", file=sys.stderr)


def machine() -> str:
    """Device, versions, load and date, which a row of docs/evidence.md gives beside its number."""
    parts = [
        f"{os.cpu_count()} cores",
        f"load {os.getloadavg()[0]:.1f}",
        f"Python {platform.python_version()}",
    ]
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        parts.append(f"torch {torch.__version__}")
        if torch.cuda.is_available():
            parts.insert(0, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return ", ".join([*parts, time.strftime("%Y-%m-%d")])


def flattened(row: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(column, cell) of a row: nested names are joined by dots, long lists of numbers become their median."""
    cells: list[tuple[str, Any]] = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            cells += flattened(value, f"{prefix}{name}.")
        else:
            cells.append((f"{prefix}{name}", cell(value)))
    return cells


def cell(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, (list, tuple, set)):
        values = list(value)
        if len(values) > MOST_VALUES and all(isinstance(one, (int, float)) for one in values):
            return cell(median(values))
        return "; ".join(str(cell(one)) for one in values[:MOST_VALUES])
    return value


def data_folder() -> Path:
    """The folder of larger traces that AORTA_DATA names; ends the program where there is none."""
    named = os.environ.get("AORTA_DATA", "")
    if not named or not Path(named).is_dir():
        print(f"{Path(sys.argv[0]).name}: AORTA_DATA must name the folder of larger traces", file=sys.stderr)
        raise SystemExit(2)
    return Path(named)


def need_gpus(needed: int = 1) -> None:
    """End the program with one line where there are fewer GPUs than it needs."""
    import torch

    found = torch.cuda.device_count()
    if found < needed:
        print(f"{Path(sys.argv[0]).name}: needs {needed} GPUs, there are {found}", file=sys.stderr)
        raise SystemExit(2)


def cpu_s(command: Sequence[str | Path], **settings: Any) -> float:
    """CPU seconds of a process and of what it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **settings)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and low and high of its 95 % bootstrap interval, of values that do not depend on each other:
    ratios of neighbouring blocks, free of drift and persistence."""
    import numpy as np

    draws = np.random.default_rng(0).choice(values, (4000, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)
