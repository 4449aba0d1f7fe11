"""A million steps on a simulated clock through what writes them: memory, files, totals.

    python benchmarks/reliability/long_run.py --output long_run.csv      # a CPU, 1 to 2 min

Steps of 100 ms (a day and four hours in all): blocks of 8 recorded ones among 1016 that the overhead leaves
out, as a short loop has them, into a file of at most --max-mb. A row each tenth: resident MiB, MiB of the
folder. Exit status 1 where memory grows by more than 1 % in the second half, files grow beyond --max-mb and 1
MiB, or a total is not what was put in: in the state of the rank, and of lines and dropped steps as a reader
sees them.
"""

import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import arguments, write  # noqa: E402

from aorta.record.sending import ThreadSink  # noqa: E402
from aorta.records.files import state_name, steps_name  # noqa: E402
from aorta.records.reader import read_steps  # noqa: E402
from aorta.records.rotation import read_dropped  # noqa: E402
from aorta.records.state import ProcessState, StateFile, Tally, read_states  # noqa: E402
from aorta.records.writer import LineWriter  # noqa: E402
from aorta.steps.notes import Frame, HostNote, LeftOutStep, LeftOutSteps, Mark, RecordedStep, ResolverSettings  # noqa: E402

STEP_NS, BODY_NS = 100_000_000, 90_000_000
PERIOD, RECORDED, TOGETHER = 1024, 8, 8
SETTINGS = ResolverSettings(
    rank=0, world_size=1, on_device=False, clock_lower_ns=0, clock_upper_ns=0,
    unix_minus_monotonic_ns=1_700_000_000_000_000_000, run_id="long",
)  # fmt: skip
STATE = ProcessState(
    run_id="long", attempt=0, rank=0, world_size=1, host="h", pid=1, process_start=None,
    started_unix_ns=SETTINGS.unix_minus_monotonic_ns, written_unix_ns=SETTINGS.unix_minus_monotonic_ns,
)  # fmt: skip


class Written(NamedTuple):
    rows: list[dict[str, Any]]
    """steps, resident_mb and folder_mb, ten times."""
    num_steps: int
    """By the rank's state."""
    step_ms: float
    num_read: int
    """Lines that a reader sees, and steps that were dropped before them."""
    read_ms: float


def long_run(folder: Path, num_steps: int, max_bytes: int) -> Written:
    """Write the steps into the folder, and read them back."""
    now_ns, monotonic, process = 0, time.monotonic, psutil.Process()
    StateFile(folder / state_name(0), 0).write(STATE)
    rows: list[dict[str, Any]] = []
    time.monotonic = lambda: now_ns / 1e9
    try:
        writer = LineWriter.create(folder / steps_name(0))
        tally = Tally(folder / state_name(0), 0)
        settings = ResolverSettings(**{name: getattr(SETTINGS, name) for name in SETTINGS.__struct_fields__})
        sink = ThreadSink(settings, writer, lambda record: None, tally)
        writer.max_bytes = max_bytes
        number = 0
        while number < num_steps:
            if number % PERIOD < RECORDED:
                sink.put(Frame(step=_recorded(number)))
                count = 1
            else:
                count = min(TOGETHER, num_steps - number)
                steps = [_left_out(one) for one in range(number, number + count)]
                sink.put(Frame(left_out=LeftOutSteps(steps, "left out", None, {})))
            if (number + count) * 10 // num_steps > number * 10 // num_steps:
                resident_mb = process.memory_info().rss / 2**20
                folder_mb = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
                rows.append({"steps": number + count, "resident_mb": resident_mb, "folder_mb": folder_mb})
            number += count
            now_ns = number * STEP_NS
        sink.close(0.0)
    finally:
        time.monotonic = monotonic
    lines = read_states(folder)[0].lines
    assert lines is not None
    dropped, num_read, read_ms = read_dropped(folder / steps_name(0)), 0, 0.0
    for record in read_steps(folder / steps_name(0), []):
        num_read, read_ms = num_read + 1, read_ms + (record.step_ms or 0.0)
    return Written(
        rows, lines.num_steps, lines.sums["step_ms"], num_read + dropped.num_steps,
        read_ms + dropped.sums.get("step_ms", 0.0),
    )  # fmt: skip


def _recorded(number: int) -> RecordedStep:
    start_ns = number * STEP_NS
    return RecordedStep(
        global_step=number, step=number, epoch=0, tokens=None, start=Mark(start_ns),
        body_end=Mark(start_ns + BODY_NS), window_end=Mark(start_ns + STEP_NS), host_start_ns=start_ns,
        host_end_ns=start_ns + BODY_NS, scalars={"loss": 1.0 / (1 + number)}, host_notes=_notes(start_ns),
        use_at_start=(0, 0, 0, 0, 0, 0), use_at_end=(0, 5_000_000, 100_000, 9_000_000, 40, 1_000_000),
    )  # fmt: skip


def _left_out(number: int) -> LeftOutStep:
    start_ns = number * STEP_NS
    return LeftOutStep(
        number, 0, start_ns, start_ns + BODY_NS, start_ns + STEP_NS, 5_000_000, 100_000, 9_000_000,
        8_000, _notes(start_ns),
    )  # fmt: skip


def _notes(start_ns: int) -> list[HostNote]:
    return [
        HostNote("data", start_ns + 1000, start_ns + 500_000, ""),
        HostNote("backward", start_ns + 40_000_000, start_ns + 80_000_000, ""),
        HostNote("optimizer", start_ns + 82_000_000, start_ns + 85_000_000, "AdamW", 4096),
    ]


def faults(written: Written, num_steps: int, max_bytes: int) -> list[str]:
    """What does not hold."""
    half, last = written.rows[4], written.rows[-1]
    most_mb = max(row["folder_mb"] for row in written.rows)
    total_ms = num_steps * STEP_NS / 1e6
    found = {
        "memory grows": last["resident_mb"] > 1.01 * half["resident_mb"],
        f"files of {most_mb:.1f} MiB": most_mb > max_bytes / 2**20 + 1,
        f"{written.num_steps} steps in the state": written.num_steps != num_steps,
        f"{written.num_read} steps are read": written.num_read != num_steps,
        "the state's time is another": not math.isclose(written.step_ms, total_ms, rel_tol=1e-9),
        "the time that is read is another": not math.isclose(written.read_ms, total_ms, rel_tol=1e-9),
        "not all was written": last["steps"] != num_steps,
    }
    return [text for text, is_so in found.items() if is_so]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--max-mb", type=float, default=64.0)
    options = parser.parse_args()
    max_bytes, began_s = int(options.max_mb * 2**20), time.process_time()
    with tempfile.TemporaryDirectory() as name:
        written = long_run(Path(name), options.steps, max_bytes)
    for row in written.rows:
        steps, resident, files = row["steps"], row["resident_mb"], row["folder_mb"]
        print(f"{steps:9d} steps  {resident:7.1f} MiB resident  {files:6.1f} MiB of files")
    wrong = faults(written, options.steps, max_bytes)
    print("; ".join(wrong) or "memory is flat, files are bounded, totals are right", end="")
    print(f"; {time.process_time() - began_s:.0f} s of CPU")
    write(options.output, written.rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
