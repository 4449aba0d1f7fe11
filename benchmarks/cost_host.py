"""Cost of aorta on the host: a collective, a process, a command, two trees. Parts of cost.py.

On a CPU; nothing else may run.

CPU time, so that other work on the machine counts little, and medians over rounds that alternate.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from harness import arguments, cpu_s, median_interval, write
from torch.testing._internal.distributed.fake_pg import FakeStore

import aorta
from aorta.attach.settings import AttachSettings, environment_for
from aorta.cli import main as aorta_command
from aorta.command_line import module_environment

_SWEPT = torch.zeros(4 << 20)
INSIDE = """
import sys, time
began, cpu_began = time.perf_counter(), time.process_time()
from aorta.attach import hooks
hooks.imported("torch", sys.modules["torch"])
print((time.process_time() - cpu_began) * 1e3, (time.perf_counter() - began) * 1e3)
"""
TRAINS = """
import time, torch, torch.distributed as dist
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)  # loads torch._dynamo, which is not aorta's time
began, cpu_began = time.perf_counter(), time.process_time()
dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
print((time.process_time() - cpu_began) * 1e3, (time.perf_counter() - began) * 1e3)
"""
PROCESSES = {"without torch": "pass", "torch, no training": "import torch"}
IMPORTS = {
    "import aorta": ["-c", "import aorta"],
    "import aorta.page.write": ["-c", "import aorta.page.write"],
    "aorta --help": ["-m", "aorta", "--help"],
    "aorta report --help": ["-m", "aorta", "report", "--help"],
}
STEP = """
import sys, time
start = time.process_time()
import torch, torch.distributed as dist
with_torch = time.process_time()
import aorta, aorta.record.recorder
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


def collective() -> None:
    options = arguments("Host microseconds that a collective costs more with the instrument.").parse_args()
    write(options.output, [{"call": name, **row} for name, row in host_cost().items()])


def attach() -> None:
    parser = arguments("""Cost of `aorta run` in processes without torch, with torch, and in one that trains.

Whole processes with and without aorta in turn, and what aorta alone takes inside them. The process of
`aorta run` itself is beside the command, and is given apart.
""")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_attach(Path(folder), options.rounds)
    print(*rows, sep="\n")
    write(options.output, rows)


def help_of_commands() -> None:
    parser = arguments("CPU seconds of `aorta COMMAND --help`, one process per command and round.")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    commands = list(words_of(aorta_command))
    times: dict[tuple[str, ...], list[float]] = {words: [] for words in commands}
    for _ in range(options.rounds):
        for words in commands:
            times[words].append(cpu_s([sys.executable, "-m", "aorta", *words, "--help"]))
    rows = [
        {"command": " ".join(words) or "aorta", "cpu_s": statistics.median(values)}
        for words, values in times.items()
    ]
    for row in rows:
        print(f"{row['command']:25} {row['cpu_s']:.2f}")
    write(options.output, rows)


def trees() -> None:
    parser = arguments("""Import time and cost of a step in two trees, one after the other, again and again.

A first round writes bytecode and does not count: an installed package has it, and compiling at each start
would grow with the lines of a tree. A collective is an all_reduce of torch's fake process group.
""")
    parser.add_argument("trees", nargs=2, type=Path, metavar="TREE")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    values: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for tree in options.trees:
        measured_tree(tree.resolve())
    for number in range(options.rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            for name, value in measured_tree(options.trees[side].resolve()).items():
                values[name][side].append(value)
    rows = []
    print(f"{'':38} {'first':>9} {'second':>9}  ratio")
    for name, sides in values.items():
        before, after = (statistics.median(side) for side in sides)
        rows.append({"what": name, "first": before, "second": after, "ratio": after / before})
        print(f"{name:38} {before:9.3f} {after:9.3f}  {after / before:5.2f}")
    write(options.output, rows)


def interval(values: Any) -> dict[str, Any]:
    """Median and its 95 % bootstrap interval."""
    median, low, high = median_interval(values)
    return {"median": median, "interval": [low, high]}


def host_cost() -> dict[str, Any]:
    """Host microseconds that a collective costs more with the instrument, on a group that does nothing."""

    os.environ.update(RANK="0", WORLD_SIZE="2")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tensor, gathered = torch.ones(1024), torch.ones(2048)
    # torch 2.13 renamed it; the old name warns there.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_reduce async": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "all_gather_into_tensor": lambda: all_gather(gathered, tensor),
    }

    def us_per_call(call: Callable[[], Any], num: int = 200) -> float:
        start = time.perf_counter()
        for _ in range(num):
            call()
        return (time.perf_counter() - start) / num * 1e6

    def us_in_cleared_caches(call: Callable[[], Any], num: int = 20) -> float:
        times = []
        for _ in range(num):
            clear_caches()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return float(np.median(times)) * 1e6

    costs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, call in calls.items():
            us_per_call(call, 2000)
            warm, cleared = [], []
            functions_off = python_functions(call)
            for _ in range(40):
                off = us_per_call(call), us_in_cleared_caches(call)
                instrument: Any = aorta.instrument(folder)
                with instrument as recorder, recorder.step():
                    us_per_call(call, 20)
                    warm.append(us_per_call(call) - off[0])
                    cleared.append(us_in_cleared_caches(call) - off[1])
                    functions = python_functions(call) - functions_off
            costs[name] = interval(np.array(warm))
            costs[name] |= {"cleared_caches": interval(np.array(cleared)), "python_functions": functions}
            low, high = costs[name]["interval"]
            print(
                f"{name:36s} +{costs[name]['median']:.1f} us per call [{low:.1f}, {high:.1f}]  "
                f"in cleared caches +{costs[name]['cleared_caches']['median']:.1f} us  "
                f"+{functions} Python functions",
                flush=True,
            )
    dist.destroy_process_group()
    return costs


def clear_caches() -> None:
    """Read and write 16 MB, as a model does to its host's caches between two collectives."""
    _SWEPT.add_(1.0)


def python_functions(call: Callable[[], Any]) -> int:
    """Number of Python functions that one call enters."""
    entered = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(entered)


def measure_attach(folder: Path, rounds: int) -> list[dict[str, Any]]:
    plain_environment = module_environment()
    plain_environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process compiles aorta again
    attached = environment_for(AttachSettings(output=str(folder / "run")), plain_environment)
    rows: list[dict[str, Any]] = []
    for name, code in PROCESSES.items():
        times: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
        for _ in range(rounds if code == "pass" else max(3, rounds // 3)):
            for key, environment in (("off", plain_environment), ("on", attached)):
                times[key].append(process([sys.executable, "-c", code], environment))
        added = (on[0] - off[0] for on, off in zip(times["on"], times["off"], strict=True))
        both = {key: medians(values) for key, values in times.items()}
        rows.append({"what": f"a process, {name}", "added_cpu_ms": statistics.median(added), **both})
    command = [sys.executable, "-m", "aorta", "run", "-o", str(folder / "none"), "--", "true"]
    times_of_run = [process(command, plain_environment) for _ in range(rounds)]
    rows.append({"what": "aorta run -- true", "on": medians(times_of_run)})
    codes = {
        "hooks, once torch is imported": (
            "import torch\n" + INSIDE,
            plain_environment | {"AORTA_RUN": attached["AORTA_RUN"]},
        ),
        "process group and recorder, at the first sign of training": (
            TRAINS.format(store=folder / "store"),
            attached,
        ),
        "the same process group without aorta": (TRAINS.format(store=folder / "store"), plain_environment),
    }
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in codes}
    for _ in range(max(3, rounds // 3)):
        for name, (code, environment) in codes.items():
            (folder / "store").unlink(missing_ok=True)
            printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
            cpu, wall = map(float, printed.split())
            figures[name].append((cpu, wall))
    return rows + [{"what": name, "on": medians(values)} for name, values in figures.items()]


def medians(values: list[tuple[float, float]]) -> dict[str, float]:
    cpu, wall = zip(*values, strict=True)
    return {"cpu_ms": statistics.median(cpu), "wall_ms": statistics.median(wall), "least_wall_ms": min(wall)}


def process(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """CPU time and time by the clock of a process, in ms."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
    wall = (time.perf_counter() - began) * 1e3
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3, wall


def words_of(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from words_of(inner, (*words, name))


def measured_tree(tree: Path) -> dict[str, float]:
    row = {f"{name}, s": run_in_tree(tree, arguments)[0] for name, arguments in IMPORTS.items()}
    with tempfile.TemporaryDirectory() as folder:
        line = run_in_tree(tree, ["-c", STEP, folder])[1].split()
    loading_s, plain_us, recorded_us, step_us = map(float, line[-4:])
    return row | {
        "import aorta.record after torch, s": loading_s,
        "all_reduce outside a step, us": plain_us,
        "all_reduce in a step, us": recorded_us,
        "an empty step, us": step_us,
    }


def run_in_tree(tree: Path, arguments: list[str]) -> tuple[float, str]:
    """CPU time of a process in the tree, and what it printed."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout
