"""How much later is a job's first step done under `aorta run`? Plain starts and recorded ones in turn.

    python benchmarks/start.py --rounds 20          # 1 min on idle cores, more on busy ones

A start is from the command until the first step of a small model has ended (--device cuda: of one on a GPU).
Rows, of the clock and of the CPU time of the process that trains: the middle of each kind's starts, its
quickest one, and the difference of either. What else a machine does makes single starts longer and never
shorter, so that the quickest of many tell what an idle one takes. CPU of the command itself is the clock's:
it runs before the program does.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import arguments, write

PROGRAM = """
import os, time, torch
device = os.environ["START_DEVICE"]
model = torch.nn.Linear(8, 8, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(3):
    model(torch.randn(4, 8, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0:
        if device != "cpu":
            torch.cuda.synchronize()
        ended = time.time(), time.process_time()
with open(os.environ["START_SAYS"], "w") as file:
    print(*ended, file=file)
"""
KINDS = {"plain": [], "aorta run": ["-m", "aorta", "run", "--no-report", "-o"]}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=55.0, help="no round begins later")
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):
            if number > 1 and time.monotonic() - began_s > options.seconds:
                break
            for kind in sorted(KINDS, reverse=number % 2 == 1):
                times_s = start(kind, Path(folder) / f"{kind} {number}", options.device)
                if number:  # the first round fills the machine's caches
                    found[kind].append(times_s)
    rows = []
    for place, what in enumerate(("clock", "cpu")):
        row: dict[str, object] = {"what": what, "starts": len(found["plain"])}
        for name, of in (("middle", statistics.median), ("quickest", min)):
            plain_s, with_s = (of([times_s[place] for times_s in found[kind]]) for kind in KINDS)
            row |= {f"{name}_plain_s": plain_s, f"{name}_with_s": with_s, f"{name}_more_s": with_s - plain_s}
        rows.append(row)
        print(
            f"{what:6s} {row['starts']} starts of each: "
            + "  ".join(
                f"{name} {row[f'{name}_plain_s']:.3f} s plain, {row[f'{name}_with_s']:.3f} with, "
                f"{row[f'{name}_more_s']:+.3f}"
                for name in ("middle", "quickest")
            )
        )
    write(options.output, rows)


def start(kind: str, folder: Path, device: str) -> tuple[float, float]:
    """Seconds until the first step has ended, by the clock, and of CPU of the process that trains."""
    folder.mkdir()
    command = [sys.executable, *KINDS[kind], *([str(folder / "run"), "--"] if KINDS[kind] else [])]
    command += [sys.executable] if KINDS[kind] else []
    program = folder / "program.py"
    program.write_text(PROGRAM)
    said = folder / "said"
    began_s = time.time()
    subprocess.run(
        [*command, str(program)],
        env=os.environ | {"START_SAYS": str(said), "START_DEVICE": device},
        check=True,
        capture_output=True,
    )
    ended_s, cpu_s = map(float, said.read_text().split())
    return ended_s - began_s, cpu_s


if __name__ == "__main__":
    main()
