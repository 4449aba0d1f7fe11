"""Import time and cost of a step in two trees, one after the other, again and again:

    python benchmarks/two_trees.py OLD NEW [--rounds 5] [--json FILE]

CPU time, so that other work on the machine counts little; medians over rounds. A first round writes
bytecode and does not count: an installed package has it, and compiling at each start would grow with the
lines of a tree. A collective is an all_reduce of a process group that answers at once (the fake one of
torch), in one process of an instrument.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

IMPORTS = {
    "import aorta": ["-c", "import aorta"],
    "import aorta.report.write": ["-c", "import aorta.report.write"],
    "aorta --help": ["-m", "aorta", "--help"],
    "aorta report --help": ["-m", "aorta", "report", "--help"],
}
STEP = """
import sys, time
start = time.process_time()
import torch, torch.distributed as dist
with_torch = time.process_time()
import aorta, aorta.recording.recorder
loaded = time.process_time()
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
tensor = torch.ones(4)

def calls():
    begin = time.thread_time()
    for _ in range(500):
        dist.all_reduce(tensor, async_op=True).wait()
    return (time.thread_time() - begin) / 500 * 1e6

plain, recorded, steps = [], [], []
with aorta.instrument(sys.argv[1]) as recorder:
    for number in range(12):
        plain.append(calls())
        with recorder.step():
            recorded.append(calls())
    for number in range(200):
        begin = time.thread_time()
        with recorder.step():
            pass
        steps.append((time.thread_time() - begin) * 1e6)
middle = lambda values: sorted(values[2:])[len(values[2:]) // 2]
print(loaded - with_torch, middle(plain), middle(recorded), middle(steps))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs=2, type=Path, metavar="TREE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="raw values of every round")
    options = parser.parse_args()
    values: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for tree in options.trees:
        measured(tree.resolve())
    for number in range(options.rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            for name, value in measured(options.trees[side].resolve()).items():
                values[name][side].append(value)
    print(f"{'':38} {'first':>9} {'second':>9}  ratio")
    for name, sides in values.items():
        before, after = (statistics.median(side) for side in sides)
        print(f"{name:38} {before:9.3f} {after:9.3f}  {after / before:5.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"rounds": options.rounds, "values": values}, indent=1) + "\n")


def measured(tree: Path) -> dict[str, float]:
    row = {f"{name}, s": cpu_s(tree, arguments)[0] for name, arguments in IMPORTS.items()}
    with tempfile.TemporaryDirectory() as folder:
        line = cpu_s(tree, ["-c", STEP, folder])[1].split()
    loading_s, plain_us, recorded_us, step_us = map(float, line[-4:])
    return row | {
        "import aorta.recording after torch, s": loading_s,
        "all_reduce outside a step, us": plain_us,
        "all_reduce in a step, us": recorded_us,
        "an empty step, us": step_us,
    }


def cpu_s(tree: Path, arguments: list[str]) -> tuple[float, str]:
    """CPU time of a process in the tree, and what it printed."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


if __name__ == "__main__":
    main()
