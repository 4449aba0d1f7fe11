"""Ten thousand emulated ranks: what a look of `aorta top` takes, and which alarms it raises.

    python benchmarks/reliability/many_ranks.py [--ranks 10000] [--clean-steps 10000] [--plants 10]

The looks are of digests as nodes of eight ranks write them. Alarms are of made numbers, a look every
simulated second: steps of 300 ms that scatter by 2, ranks whose exposed communication differs by what they
are and from look to look, and stages of a pipeline that wait less. A planted rank is late by 20 to 150 ms a
step from a random second on; a slot, a median over the newest block, tells it 3 s later. Exit status 1 where
a bound fails: 1 s of CPU, 200 MB, 15 s, one false alarm.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import numpy as np  # noqa: E402
from harness import ROOT, arguments, write  # noqa: E402

from aorta.account.watch import Alarm, Watch  # noqa: E402
from aorta.records.digests import SLOT, SLOT_BYTES, Slots, packed_slot  # noqa: E402
from aorta.records.files import digest_name  # noqa: E402

STEP_MS, NODE = 300.0, 8
TOLD_AFTER_S = 3.0


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--clean-steps", type=int, default=10_000)
    parser.add_argument("--plants", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = np.random.default_rng(options.seed)
    cpu_s, mb = look(options.ranks, chance)
    rows: list[dict[str, Any]] = [{"what": "look", "cpu_s": round(cpu_s, 2), "mb": round(mb)}]
    print(rows[-1], flush=True)
    is_right = cpu_s <= 1 and mb <= 200
    for _ in range(options.plants):
        rank, late_ms = int(chance.integers(options.ranks)), float(chance.choice([20, 30, 60, 150]))
        onset_s = float(chance.uniform(60, 61))
        alarms = watched(Job(options.ranks, chance, onset_s, rank, late_ms), 90)
        after_s = next((s - onset_s for s, alarm in alarms if alarm.ranks == [rank]), None)
        is_right &= after_s is not None and after_s <= 15
        rows.append({"what": "plant", "late_ms": late_ms, "after_s": after_s, "num_alarms": len(alarms)})
        print(rows[-1], flush=True)
    num_looks = round(options.clean_steps * STEP_MS / 1e3)
    if num_looks:
        alarms = watched(Job(options.ranks, chance), num_looks)
        rows.append({"what": "clean", "steps": options.clean_steps, "num_alarms": len(alarms)})
        print(rows[-1], flush=True)
        is_right &= len(alarms) <= 1
    write(options.output, rows)
    return 0 if is_right else 1


def look(num_ranks: int, chance: np.random.Generator) -> tuple[float, float]:
    """CPU time in s and memory in MB of `aorta top --once`."""
    with tempfile.TemporaryDirectory() as name:
        for first in range(0, num_ranks, NODE):
            slots = [
                packed_slot(
                    (1, 0, rank, num_ranks, 20, 12, 0, 100, 101, time.time_ns()),
                    (300, 300, 300, 200, 80, 20, 150, 70, 80 + chance.normal(), 1.0, 1e10, 1700, 600),
                )
                for rank in range(first, min(first + NODE, num_ranks))
            ]
            data = b"".join(slot.ljust(SLOT_BYTES, b"\0") for slot in slots)
            (Path(name) / digest_name(first)).write_bytes(data)
        command = [sys.executable, "-m", "aorta", "top", name, "--once"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, capture_output=True, env=environment)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3


class Job:
    """Slots of all ranks at a second."""

    def __init__(
        self,
        num_ranks: int,
        chance: np.random.Generator,
        onset_s: float = float("inf"),
        rank: int = 0,
        late_ms: float = 0.0,
    ) -> None:
        self.chance, self.onset_s, self.rank, self.late_ms = chance, onset_s, rank, late_ms
        self.usual_ms = 60 + chance.normal(0, 3, num_ranks)
        self.usual_ms[np.arange(num_ranks) // 1250 % 8 == 7] -= 15  # a stage that waits less

    def slots(self, second: int) -> Slots:
        num_ranks = len(self.usual_ms)
        made = np.zeros(num_ranks, SLOT)
        made["rank"], made["world_size"] = np.arange(num_ranks), num_ranks
        made["global_step"] = int(second * 1e3 / STEP_MS)
        made["num_steps"] = made["global_step"] + 1
        noise_ms = self.chance.normal(0, 1, num_ranks) + self.chance.exponential(0.5, num_ranks)
        late_ms = self.late_ms if second >= self.onset_s + TOLD_AFTER_S else 0.0
        made["median_step_ms"] = STEP_MS + abs(self.chance.normal(0, 2)) + late_ms
        made["median_exposed_ms"] = self.usual_ms + noise_ms + late_ms
        made["median_exposed_ms"][self.rank] -= late_ms
        return made


def watched(job: Job, num_looks: int) -> list[tuple[int, Alarm]]:
    watch = Watch()
    return [(s, alarm) for s in range(num_looks) for alarm in watch.look(job.slots(s), float(s), s)]


if __name__ == "__main__":
    sys.exit(main())
