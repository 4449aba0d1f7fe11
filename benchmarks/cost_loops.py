"""What does recording cost in loops that the host bounds? Blocks with and without in turn, in one process.

    torchrun --nproc_per_node 2 benchmarks/cost_loops.py --output cost_loops.csv      # GPUs, 4 min
    torchrun --nproc_per_node 2 benchmarks/cost_loops.py --small                      # tries it on a CPU

Loops: `buckets`, DDP with 98 small buckets; `item`, each gradient is read by .item(); `foreach`, AdamW one
tensor at a time; and the cases of cases.py. Kinds of blocks: `without`, the recorder is paused; `recorded`,
every step is recorded, and its collectives are not seen one by one (on a GPU, once they are known); `seen`,
they are; `left_out`, no step is recorded, and the recorder is on; `records`, the driver's records alone, by
the C library, without steps. A block of `without` stands before and after each other one, and what is told is
the block over the mean of the two; so is `again`, a block of `without` itself: what the method makes of
nothing. Threads that launch have cores of their own. Then the loop runs on with the overhead of 1 % and
without any of this: printed beside are `every` that it would choose next, and of run.json the cost that the
recorder measured itself.
Rows, of the time, of the CPU time of the threads that launch (cpu_) and of the fastest step of each block by
the host's clock (quiet_), which other programs of the machine move least and which tells nothing of a loop
that the device bounds: the middle of these ratios by Hodges and Lehmann, with the interval of Wilcoxon's
signed ranks, up to a seventh too narrow where one kind is alone, whose neighbours share a block of `without`.
every_step combines `recorded` and `seen` by the share of steps that are seen, at_limit this and `left_out` by
the share that were recorded.

`left_out` alone (--kinds left_out) is measured step by step, since what slows a machine lasts for seconds:
hooks, samples of the stack and the step's ends are on in every other step, and the rest of the recorder is as
it is in steps that are left out. So an interval is half as wide in the same time.
"""

import gc
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import CASES, TINY, Job, config_of, pin_threads, process_group
from harness import arguments, write
from in_turn import OnTime, launches, launching_ms, middle
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aorta
from aorta.record import stacks
from aorta.record.overhead import NUM_FIRST, SEEN_EVERY, share_recorded
from aorta.records.reader import read_run

HOST_BOUND = ("buckets", "item", "foreach")
KINDS = ("recorded", "left_out", "seen", "records")
RARELY = ("seen", "records")
"""Not in every round: they tell what the others consist of."""
COLUMNS = ("", "cpu_", "quiet_")
"""What is measured of a block, as its rows begin."""
WARM_STEPS = 6
COLD_STEPS = 2
"""Behind a switch, before a block: the first ones take up to 0.2 ms longer on a CPU, the sixth 0.1."""
STEPS = 2
"""Timed steps in a block. A block differs from those beside it by as much whether it has 1 step or 6 (0.06 to
0.09 in seven host-bound runs on H100 and H200: what slows a machine lasts for seconds), so that short blocks,
which are more, tell twice as much in the same time."""
MOST_THREADS, LEAST_MS = 6, 0.005


class Block(nn.Module):
    """A layer of a transformer, in the simplest form."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = max(1, width // 64)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x_BSD)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BSD = x_BSD + self.out(mixed)
        hidden: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x_BSD))))
        return x_BSD + hidden


class HostBound:
    """DDP of a small transformer, in a loop that launches more than the device is busy with."""

    def __init__(self, name: str, device: torch.device, small: bool) -> None:
        width, layers, self.length = (32, 2, 8) if small else (512, 24, 128)
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(width) for _ in range(layers))).to(device)
        self.name, self.device, self.width = name, device, width
        ids = None if device.type == "cpu" else [device.index]
        self.model = DistributedDataParallel(
            model, device_ids=ids, bucket_cap_mb=0.05 if name == "buckets" else 25
        )
        foreach = False if name == "foreach" else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=foreach)

    def step(self, recorder: Any = None) -> None:
        if recorder is None:
            self._body()
        else:
            with recorder.step():
                self._body()

    def _body(self) -> None:
        x = torch.randn(4, self.length, self.width, device=self.device)
        self.model(x).square().mean().backward()
        if self.name == "item":
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad.abs().max().item()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        return None


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--loops", nargs="+", default=[*HOST_BOUND, "ddp", "fsdp_short", "tp", "fsdp"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--rarely", type=int, default=4, help="one round of so many has seen and records")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps in a block")
    parser.add_argument("--seconds", type=float, default=28.0, help="for the blocks of a loop, at most")
    parser.add_argument("--limit-seconds", type=float, default=20.0, help="of the run with 1 %%, at least")
    parser.add_argument("--small", action="store_true", help="small models, to try it")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        for name in options.loops:
            try:
                found = measured(name, device, options, Path(folder) / name)
            except Exception as error:
                found = {"loop": name, "failed": f"{type(error).__name__}: {error}"[:200]}
            rows.append(found)
            if dist.get_rank() == 0:
                show(found)
                write(options.output, rows)


def measured(name: str, device: torch.device, options: Any, folder: Path) -> dict[str, Any]:
    """The row of one loop."""
    loop: Any
    if name in HOST_BOUND:
        loop = HostBound(name, device, options.small)
    else:
        loop = Job(config_of((TINY if options.small else CASES)[name]), device)
    for _ in range(WARM_STEPS):
        loop.step()
    blocks = in_turn(loop, options, folder / "blocks")
    row: dict[str, Any] = {"loop": name, "step_ms": float(np.median(blocks["again without"][..., 0]))}
    row["threads"] = blocks.pop("threads")
    for kind in ("again", *options.kinds):
        ratios = blocks[kind] / blocks[f"{kind} without"].mean(axis=1)
        for column, what in enumerate(COLUMNS):
            ends = middle(ratios[:, column])
            row |= {
                f"{what}{kind}{end}": value for end, value in zip(("", "_low", "_high"), ends, strict=True)
            }
        row[f"{kind}_pairs"] = len(ratios)
    if "recorded" in options.kinds and "seen" in options.kinds:
        for end in ("", "_low", "_high"):
            row[f"every_step{end}"] = (
                row[f"recorded{end}"] + (row[f"seen{end}"] - row[f"recorded{end}"]) / SEEN_EVERY
            )
    row |= at_limit(loop, folder / "limit", row["step_ms"], options)
    if row["every"] and "every_step" in row and "left_out" in row:
        share = share_recorded(row["every"])
        for end in ("", "_low", "_high"):
            row[f"at_limit{end}"] = share * row[f"every_step{end}"] + (1 - share) * row[f"left_out{end}"]
    loop.close()
    return row


def in_turn(loop: Any, options: Any, folder: Path) -> dict[str, Any]:
    """Of the blocks in ms a step, by COLUMNS (the time is the slower rank's): of each kind, and beside."""
    order, began = random.Random(0), time.perf_counter()
    ran: list[str] = []
    mine: list[tuple[float, float, float]] = []
    threads: dict[str, list[dict[str, float]]] = defaultdict(list)
    step_by_step = options.kinds == ["left_out"]
    with aorta.instrument(folder, overhead=0.01) as recorder:
        recorded, seen = [True], [False]
        sampling, sources = recorder._sampling, recorder._sources
        sampling._is_planned = lambda place: recorded[0]  # type: ignore[method-assign]
        sampling.is_seen = lambda: seen[0]  # type: ignore[method-assign]
        for _ in range(30):
            loop.step(recorder)
        if torch.cuda.is_available():
            pin_threads()
        if step_by_step:
            recorded[0] = False
            for _ in range(4):
                loop.step(recorder)
            sources.stacks.stop()
            on_time = OnTime()
            sampler = threading.Thread(target=sources.stacks._run, name="aorta-stacks", daemon=True)
            sources.stacks._stopping, sources.stacks._thread = on_time, sampler  # type: ignore[assignment]
            stacks.CPU_SHARE /= 2  # it is on half of the time
            sampler.start()
        else:
            recorder.pause()
        gc.collect()
        gc.freeze()

        def run_a_step(kind: str) -> None:
            on = kind == "left_out"
            (sources.host_watch.install if on else sources.host_watch.uninstall)()
            on_time.switch(on)
            numbers, _ = block(lambda: loop.step(recorder if on else None), 1, 0, launching_ms)
            mine.append(numbers)
            ran.append(kind)

        def run(kind: str) -> None:
            if step_by_step:
                return run_a_step(kind)
            recorded[0], seen[0] = kind in ("recorded", "seen"), kind == "seen"
            if kind != "without":
                recorder.resume()
            if kind == "records":
                if sources.looks:
                    sources.look_away()
                sources.watch_waits(False)
                sources.kernels.wake()
            with_steps = kind in ("recorded", "seen", "left_out")
            numbers, used = block(
                (lambda: loop.step(recorder)) if with_steps else loop.step,
                options.steps,
                COLD_STEPS,
                threads_ms,
            )
            mine.append(numbers)
            ran.append(kind)
            threads[kind].append(used)
            if kind != "without":
                recorder.pause()

        for number in range(options.rounds):
            kinds = [
                kind for kind in options.kinds if number % options.rarely == 0 or kind not in RARELY
            ] or options.kinds
            for kind in order.sample(kinds, len(kinds)):
                run("without")
                run(kind)
            if not agreed(time.perf_counter() - began < options.seconds):
                break
        run("without")
        if step_by_step:
            stacks.CPU_SHARE *= 2
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    times = np.mean(np.array(of_ranks), axis=0)
    times[:, 0] = np.max(np.array(of_ranks)[..., 0], axis=0)
    found: dict[str, Any] = {
        "threads": {kind: threads_beside(threads, kind) for kind in options.kinds if kind in threads},
        "again": times[2:-1:2],
        "again without": np.stack([times[0:-3:2], times[4::2]], axis=1),
    }
    for kind in options.kinds:
        at = np.array([place for place, name in enumerate(ran) if name == kind])
        found[kind] = times[at]
        found[f"{kind} without"] = np.stack([times[at - 1], times[at + 1]], axis=1)
    return found


def threads_beside(threads: dict[str, list[dict[str, float]]], kind: str) -> str:
    """'main +0.31, aorta-records +0.12': ms of CPU a step in blocks of a kind beyond those without."""
    names = {name for used in threads[kind] for name in used}
    more_ms = {
        name: float(np.median([used[name] for used in threads[kind]]))
        - float(np.median([used[name] for used in threads["without"]]))
        for name in names
    }
    largest = sorted(more_ms.items(), key=lambda entry: -abs(entry[1]))[:MOST_THREADS]
    return ", ".join(f"{name} {ms:+.3f}" for name, ms in largest if abs(ms) >= LEAST_MS)


def at_limit(loop: Any, folder: Path, step_ms: float, options: Any) -> dict[str, Any]:
    """What the recorder itself says of a run with the default overhead."""
    num_steps = NUM_FIRST + (60 if options.small else max(160, int(options.limit_seconds * 1e3 / step_ms)))
    synchronise()
    began = time.perf_counter()
    with aorta.instrument(folder, overhead=0.01) as recorder:
        for _ in range(num_steps):
            loop.step(recorder)
        synchronise()
        seconds = time.perf_counter() - began
    dist.barrier()
    overhead = read_run(folder).overhead
    assert overhead is not None
    low, high = overhead.later_interval or (None, None)
    return {
        "every": recorder._sampling.meter.chosen_every(0.01),
        "own_cost": overhead.later_cost,
        "own_low": low,
        "own_high": high,
        "own_step_ms": overhead.step_ms,
        "always_on": overhead.always_on,
        "run_step_ms": seconds / num_steps * 1e3,
    }


def block(
    step: Callable[[], object], num_steps: int, num_cold: int, cpu_ms: Callable[[], dict[str, float]]
) -> tuple[tuple[float, float, float], dict[str, float]]:
    """Numbers by COLUMNS, and CPU time of each thread, in ms a step."""
    for _ in range(num_cold):
        step()
    synchronise()
    dist.barrier()
    cpu_began, times_s = cpu_ms(), [time.perf_counter()]
    for _ in range(num_steps):
        step()
        times_s.append(time.perf_counter())
    cpu = cpu_ms()  # before the wait, which spins
    synchronise()
    elapsed_s = time.perf_counter() - times_s[0]
    used = defaultdict(float, {name: (ms - cpu_began.get(name, 0.0)) / num_steps for name, ms in cpu.items()})
    used_ms = sum(ms for name, ms in used.items() if launches(name))
    return (elapsed_s / num_steps * 1e3, used_ms, min(np.diff(times_s)) * 1e3), used


def threads_ms() -> dict[str, float]:
    """CPU time so far of the threads of this process: main is the one that trains."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    names[threading.get_native_id()] = "main"
    found: dict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        try:
            name = names.get(int(task.name)) or (task / "comm").read_text().strip()
            found[name] += int((task / "schedstat").read_text().split()[0]) / 1e6
        except OSError:  # it has ended
            continue
    return dict(found)


def agreed(go_on: bool) -> bool:
    answer = [go_on]
    dist.broadcast_object_list(answer)
    return bool(answer[0])


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def show(row: dict[str, Any]) -> None:
    if "failed" in row:
        print(f"{row['loop']:11s} failed: {row['failed']}", flush=True)
        return
    kinds = [kind for kind in ("again", *KINDS, "every_step", "at_limit") if kind in row]
    num_blocks = max(row[f"{kind}_pairs"] for kind in KINDS if kind in row)
    for what in COLUMNS:
        texts = [
            f"{kind} {row[what + kind]:.3f} [{row[f'{what}{kind}_low']:.3f}, {row[f'{what}{kind}_high']:.3f}]"
            for kind in kinds
            if what + kind in row
        ]
        head = what[:-1] or f"{row['step_ms']:.2f} ms x {num_blocks}"
        print(f"{'' if what else row['loop']:11s} {head:>16s}  {'  '.join(texts)}", flush=True)
    for kind, text in row["threads"].items():
        print(f"{'':11s} {'':>16s}  {kind}, ms of CPU a step: {text}", flush=True)
    own = row["own_cost"]
    print(
        f"{'':11s} with 1 %: every {row['every']}, "
        + ("its own cost is not known" if own is None else f"its own cost {own:.4f} [{row['own_low']:.4f}, ")
        + ("" if own is None else f"{row['own_high']:.4f}], {row['own_step_ms']:.2f} ms a recorded step")
        + f", always on {row['always_on'] or 0:.4f}, run {row['run_step_ms']:.2f} ms a step",
        flush=True,
    )


if __name__ == "__main__":
    main()
