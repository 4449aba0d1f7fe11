"""Do millions of kernel records come through, and does each one that does not say so?

    python benchmarks/long_records.py --output long_records.csv      # a CPU and a C compiler, 1 min

A stand-in for CUPTI (tests/device/native) hands buffers to the library of kernel records; what the library
gives is resolved to step records as beside a training loop. Steps of 20 000 kernels, a fifth of them nodes of
CUDA graphs. Parts: `all`, everything comes; `no_time`, one kernel in 10 000 has no times; `full`, the ring is
read too late now and then. Columns: what was launched, what the lines of the steps count, what was said to be
missing; CPU seconds and growth of memory after the first tenth.
"""

import ctypes
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import arguments, write

from aorta.steps.kernel_steps import KernelSteps
from aorta.steps.notes import KernelChunk, RecordedStep, ResolverSettings
from tests.device.native.stand_ins import Cupti, PlannedActivity, build_stand_in
from tests.steps.kernel_rows import step as raw_step

PER_STEP = 20_000
PER_BUFFER = 4_000
"""Kernels; the first and last buffer of a step hold a mark, too."""
CAPACITY = 1 << 19
KERNEL_NS, PERIOD_NS = 800, 1_000
KERNEL, FILL = 10, 2
NAMES = [f"kernel_{i}".encode() for i in range(40)]
PARTS = ("all", "no_time", "full")


class Run:
    """Steps of one part. A process makes one: the library has one ring."""

    def __init__(self, source: Cupti, part: str) -> None:
        self.source, self.part = source, part
        self.steps = KernelSteps(
            ResolverSettings(
                rank=0, world_size=1, on_device=True, clock_lower_ns=0, clock_upper_ns=0,
                unix_minus_monotonic_ns=0,
            )
        )  # fmt: skip
        self.planned = (PlannedActivity * (PER_BUFFER + 1))()
        self.table = np.frombuffer(memoryview(self.planned).cast("B"), self._dtype())
        self._kept: list[ctypes.Array[ctypes.c_char]] = []
        self.names = np.array([self._address(name) for name in NAMES], dtype=np.uint64)
        self.now_ns = 10**9
        self.correlation = self.num_launched = self.num_told = self.num_unresolved = 0
        self.num_names = 0
        self.ready: list[RecordedStep] = []

    @staticmethod
    def _dtype() -> np.dtype[Any]:
        four = ["kind", "value", "stream", "device", "correlation", "graph"]
        fields = [(name, "u4") for name in four] + [
            (name, "u8") for name in ("start", "end", "bytes", "name")
        ]
        return np.dtype(fields)

    def _address(self, name: bytes) -> int:
        self._kept.append(ctypes.create_string_buffer(name))
        return ctypes.addressof(self._kept[-1])

    def _mark(self, row: Any, number: int) -> None:
        assert self.source.library.aorta_kernels_mark(ctypes.c_void_p(3), number) == 0
        self.correlation += 1
        row["kind"], row["value"], row["bytes"], row["stream"] = FILL, 0xA0000000 | number, 4, 3
        row["correlation"] = self.correlation % 2**32
        row["start"], row["end"] = self.now_ns, self.now_ns + 1
        self.now_ns += PERIOD_NS

    def step(self, number: int, reads: bool) -> None:
        """One step. reads: its records are taken while it runs."""
        first_mark = number * 2 + 1
        for place in range(PER_STEP // PER_BUFFER):
            rows = self.table[: PER_BUFFER + 1]
            rows[:] = np.zeros(1, rows.dtype)
            rows["device"] = 1
            work = rows
            if place == 0:
                self._mark(rows[0], first_mark)
                work = rows[1:]
            elif place == PER_STEP // PER_BUFFER - 1:
                work = rows[:PER_BUFFER]
            else:
                work = rows = rows[:PER_BUFFER]
            order = np.arange(PER_BUFFER)
            work["kind"], work["stream"] = KERNEL, 3 + order % 2
            work["name"] = self.names[order % len(NAMES)]
            work["graph"] = order % 5 == 0
            work["correlation"] = (self.correlation + 1 + order) % 2**32
            work["start"] = self.now_ns + PERIOD_NS * order
            work["end"] = work["start"] + KERNEL_NS
            if self.part == "no_time" and place == 0:
                work["start"][:2] = work["end"][:2] = 0
            self.correlation += PER_BUFFER
            self.now_ns += PERIOD_NS * PER_BUFFER
            self.num_launched += PER_BUFFER
            if place == PER_STEP // PER_BUFFER - 1:
                self._mark(rows[PER_BUFFER], first_mark + 1)
            num = len(rows)
            self.source.vendor.play_return(self.source.vendor.play_buffer(self.planned, num))
            if reads:
                self.read()
        self.ready.append(raw_step([], number, (first_mark, first_mark + 1, first_mark + 1)))

    def read(self) -> None:
        """Take what is in the ring, as the sending thread does."""
        while True:
            rows, taken = self.source.take(1 << 16)
            names = [self.source.name(i) for i in range(self.num_names, taken.num_names)]
            self.num_names = int(taken.num_names)
            self.steps.add(
                KernelChunk(
                    records=rows.tobytes(), names=names, settled=int(taken.settled), complete_ns=0,
                    num_lost=int(taken.num_lost), lost_ns=(int(taken.lost_start), int(taken.lost_end)),
                    num_dropped=int(taken.num_dropped), num_no_time=int(taken.num_no_time),
                )
            )  # fmt: skip
            if len(rows) < 1 << 16:
                break

    def resolve(self) -> None:
        for raw in self.ready:
            record = self.steps.resolve(raw)
            if record.kernels is None:
                self.num_unresolved += 1
            else:
                self.num_told += record.kernels.num_kernels
        self.ready = []


def measured(source: Cupti, part: str, num_records: int) -> dict[str, Any]:
    run = Run(source, part)
    process = psutil.Process()
    num_steps = num_records // PER_STEP
    base_mb, began_s = 0.0, time.process_time()
    for number in range(num_steps):
        late = part == "full" and number % 100 in range(50, 90)
        run.step(number, reads=not late)
        if not late:
            run.read()
            run.resolve()
        if number == num_steps // 10:
            base_mb = process.memory_info().rss / 2**20
    run.read()
    run.resolve()
    coverage = run.steps.coverage()
    return {
        "part": part,
        "launched": run.num_launched,
        "in_lines": run.num_told,
        "no_time": coverage.num_no_time,
        "lost": coverage.num_lost,
        "steps": num_steps,
        "steps_that_say_why": run.num_unresolved,
        "late": coverage.num_late,
        "cpu_s": time.process_time() - began_s,
        "growth_mb": process.memory_info().rss / 2**20 - base_mb,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--records", type=int, default=10**7)
    parser.add_argument("--part", choices=PARTS, default="all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Cupti(str(build_stand_in("cupti", Path(folder))))
        source.opened(CAPACITY)
        row = measured(source, options.part, options.records)
    shown = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
    )
    print("  ".join(shown))
    write(options.output, [row])


if __name__ == "__main__":
    main()
