"""Is the first cause that `aorta why` names the one that was planted?

    python benchmarks/planted_causes.py --output planted_causes.json            # gloo, 2 ranks, no GPU
    python benchmarks/planted_causes.py --cases late_rank clean_ddp --repeats 3
    python benchmarks/planted_causes.py --device cuda --output planted.json     # NCCL, on 2 GPUs

Every case trains a small model for some steps on two ranks, with one known cause of a long step,
or with none. Three are planted in the records afterwards (clocks, allocator, memory), since no program can
make them. The rules of aorta.causes know nothing of this file: they hold no number of it.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from cases import environment
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import aorta
from aorta.command_line import module_environment
from aorta.records.seal import sealed

PAUSE_S = 0.03
"""Of what is planted as a delay."""
PERIOD = 5
"""Steps from one rare event to the next."""


@dataclass(frozen=True)
class Case:
    expected: str | None
    """Kind of the first cause; None: no cause at all."""
    who: int | None = None
    """Rank that the first cause must name."""
    on: tuple[str, ...] = ("cpu", "cuda")


CASES = {
    "late_rank": Case("late_rank", who=1),
    "loader_one_rank": Case("data_loading", who=1),
    "loader_all_ranks": Case("data_loading"),
    "item_in_loop": Case("synchronisation", on=("cuda",)),
    "tiny_buckets": Case("small_messages"),
    "small_all_reduces": Case("small_messages"),
    "no_prefetch": Case("no_prefetch"),
    "host_bound_optimizer": Case("optimizer"),
    "throttled_clock": Case("clock", who=1, on=("cpu",)),
    "shared_communicator": Case("shared_communicator"),
    "unbalanced_experts": Case("imbalance", who=1),
    "allocation_retries": Case("memory", on=("cpu",)),
    "memory_limit": Case("memory", on=("cpu",)),
    "checkpoint": Case("checkpoint"),
    "garbage_collection": Case("garbage_collection", who=1),
    "between_steps": Case("between_steps"),
    "launch_bound": Case("launch_bound", on=("cuda",)),
    "clean_ddp": Case(None),
    "clean_async": Case(None),
    "clean_loader": Case(None, on=("cpu",)),
    "clean_prefetch": Case(None),
}


# ---- a rank ------------------------------------------------------------------------------------


@dataclass
class Rank:
    rank: int
    device: torch.device
    width: int
    batch: int
    depth: int

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def model(self, num: int | None = None) -> nn.Sequential:
        layers: list[nn.Module] = []
        for _ in range(self.depth if num is None else num):
            layers += [nn.Linear(self.width, self.width), nn.GELU()]
        return nn.Sequential(*layers).to(self.device)

    def batch_of(self) -> torch.Tensor:
        return torch.randn(self.batch, self.width, device=self.device)

    def compute(self, times: int) -> None:
        """Plain work of the device."""
        a = torch.ones(self.width, self.width, device=self.device)
        for _ in range(times):
            a = a @ a * 1e-3


class Samples(Dataset[torch.Tensor]):
    def __init__(self, rank: Rank, delay_s: float) -> None:
        self.rank, self.delay_s = rank, delay_s

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.delay_s:
            time.sleep(self.delay_s)
        return torch.ones(self.rank.width)


class Batches(Dataset[torch.Tensor]):
    def __init__(self, rank: Rank) -> None:
        self.batch = torch.ones(64 * rank.batch, rank.width)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batch


def train(
    rank: Rank,
    recorder: Any,
    num_steps: int,
    *,
    bucket_mb: float = 25,
    delay_s: float = 0.0,
    in_step: Callable[[int, torch.Tensor], None] | None = None,
    after_step: Callable[[int], None] | None = None,
    optimizer: Callable[[nn.Module], Any] | None = None,
    depth: int | None = None,
) -> None:
    """DDP with a DataLoader; what the keyword arguments say is planted."""
    model = DistributedDataParallel(rank.model(depth), bucket_cap_mb=bucket_mb)
    update = optimizer(model) if optimizer is not None else torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = iter(DataLoader(Samples(rank, delay_s), batch_size=rank.batch))
    for step in range(num_steps):
        with recorder.step(tokens=rank.batch):
            x = next(loader).to(rank.device, non_blocking=True)
            loss = model(x).square().mean()
            loss.backward()
            if in_step is not None:
                in_step(step, loss)
            update.step()
            update.zero_grad()
        if after_step is not None:
            after_step(step)


def late_rank(rank: Rank, recorder: Any, num: int) -> None:
    model = DistributedDataParallel(rank.model())
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            if rank.rank == 1:
                if rank.is_cuda:
                    rank.compute(40)
                else:
                    time.sleep(PAUSE_S)
            model(rank.batch_of()).square().mean().backward()
            update.step()
            update.zero_grad()


def loader_one_rank(rank: Rank, recorder: Any, num: int) -> None:
    train(rank, recorder, num, delay_s=PAUSE_S / rank.batch if rank.rank == 1 else 0.0)


def loader_all_ranks(rank: Rank, recorder: Any, num: int) -> None:
    train(rank, recorder, num, delay_s=PAUSE_S / rank.batch)


def item_in_loop(rank: Rank, recorder: Any, num: int) -> None:
    """The host reads something after every layer, with little queued behind it."""
    model = rank.model(6 * rank.depth)
    update = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            x = rank.batch_of()
            for layer in model:
                x = layer(x)
                x.abs().max().item()
            loss = x.square().mean()
            loss.backward()
            update.step()
            update.zero_grad()
            dist.all_reduce(loss.detach())


def tiny_buckets(rank: Rank, recorder: Any, num: int) -> None:
    if rank.is_cuda:
        rank.width = 512
    train(rank, recorder, num, bucket_mb=0.001, depth=6 * rank.depth)


def small_all_reduces(rank: Rank, recorder: Any, num: int) -> None:
    small = [torch.ones(256, device=rank.device) for _ in range(400 if rank.is_cuda else 60)]

    def hook(step: int, loss: torch.Tensor) -> None:
        for one in small:
            dist.all_reduce(one)

    train(rank, recorder, num, in_step=hook)


def _sharded(rank: Rank, recorder: Any, num: int, prefetch: bool) -> None:
    """Layers whose weights are gathered before they are used; ahead of time, or not."""
    world = dist.get_world_size()
    shards = [torch.randn(rank.width // world, rank.width, device=rank.device) for _ in range(rank.depth)]
    # Enough compute a layer to hide its gather.
    rows = (64 if prefetch or rank.is_cuda else 16) * rank.batch
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            x = torch.randn(rows, rank.width, device=rank.device)
            whole: list[torch.Tensor] = []
            works: list[Any] = []

            def gather(layer: int, whole: list[torch.Tensor] = whole, works: list[Any] = works) -> None:
                whole.append(torch.empty(rank.width, rank.width, device=rank.device))
                works.append(dist.all_gather_into_tensor(whole[-1], shards[layer], async_op=True))

            if prefetch:
                gather(0)
            for layer in range(rank.depth):
                if not prefetch:
                    gather(layer)
                elif layer + 1 < rank.depth:
                    gather(layer + 1)
                works[layer].wait()
                x = (x @ whole[layer]) * 1e-2
                x = (x @ whole[layer].T) * 1e-2


def no_prefetch(rank: Rank, recorder: Any, num: int) -> None:
    _sharded(rank, recorder, num, prefetch=False)


def clean_prefetch(rank: Rank, recorder: Any, num: int) -> None:
    _sharded(rank, recorder, num, prefetch=True)


class SlowSGD(torch.optim.Optimizer):
    """As plain as an optimizer that a researcher writes: a Python loop over slices of every parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                for row in range(0, parameter.shape[0], 2):
                    parameter[row : row + 2].add_(parameter.grad[row : row + 2], alpha=-group["lr"])


def host_bound_optimizer(rank: Rank, recorder: Any, num: int) -> None:
    train(rank, recorder, num, optimizer=lambda model: SlowSGD(model.parameters()))


def shared_communicator(rank: Rank, recorder: Any, num: int) -> None:
    """A small call that the step waits for stands behind a large one that it does not wait for."""
    large = torch.ones((256 << 20) if rank.is_cuda else (2 << 20), device=rank.device)
    small = torch.ones(8, device=rank.device)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            rank.compute(4)
            work = dist.all_reduce(large, async_op=True)
            if not rank.is_cuda:  # gloo runs two calls of a group at once
                more = dist.all_reduce(large.clone(), async_op=True)
            dist.all_reduce(small)
            rank.compute(4 if rank.is_cuda else 16)
            work.wait()
            if not rank.is_cuda:
                more.wait()


def unbalanced_experts(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 1 gets three tokens of four."""
    rows = 64 * rank.batch
    few, many = rows // 4, rows - rows // 4
    expert = rank.model(2)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            x = torch.randn(rows, rank.width, device=rank.device)
            sent = [few, many]
            received = [few, few] if rank.rank == 0 else [many, many]
            tokens = torch.empty(sum(received), rank.width, device=rank.device)
            dist.all_to_all_single(tokens, x, received, sent)
            tokens = expert(tokens).detach()
            back = torch.empty(rows, rank.width, device=rank.device)
            dist.all_to_all_single(back, tokens, sent, received)


def checkpoint(rank: Rank, recorder: Any, num: int) -> None:
    state = {"weights": torch.ones(3 << 20), "more": [torch.ones(64 << 10) for _ in range(40)]}
    with tempfile.TemporaryDirectory() as folder:

        def hook(step: int, loss: torch.Tensor) -> None:
            if step % PERIOD == 0:
                torch.save(state, f"{folder}/{rank.rank}.pt")

        train(rank, recorder, num, in_step=hook)


def garbage_collection(rank: Rank, recorder: Any, num: int) -> None:
    """A rank with many objects collects in single steps."""
    kept = [[{"a": [i]}] for i in range(200_000 if rank.rank == 1 else 10)]

    def hook(step: int, loss: torch.Tensor) -> None:
        if rank.rank == 1 and step % PERIOD == 2:
            gc.collect()

    train(rank, recorder, num, in_step=hook)
    del kept


def between_steps(rank: Rank, recorder: Any, num: int) -> None:
    train(rank, recorder, num, after_step=lambda step: time.sleep(PAUSE_S))


def launch_bound(rank: Rank, recorder: Any, num: int) -> None:
    """Thousands of tiny kernels."""
    x = torch.ones(64, device=rank.device)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            for _ in range(1500):
                x = x * 1.0001
            dist.all_reduce(x)


def clean_ddp(rank: Rank, recorder: Any, num: int) -> None:
    model = DistributedDataParallel(rank.model(2))
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            x = torch.randn(64 * rank.batch, rank.width, device=rank.device)
            model(x).square().mean().backward()
            update.step()
            update.zero_grad()


def clean_async(rank: Rank, recorder: Any, num: int) -> None:
    """An all-reduce that compute hides."""
    tensor = torch.ones(256 << 10, device=rank.device)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            work = dist.all_reduce(tensor, async_op=True)
            rank.compute(16 if not rank.is_cuda else 8)
            work.wait()


def clean_loader(rank: Rank, recorder: Any, num: int) -> None:
    """A loader that gives whole batches, which are there already."""
    model = DistributedDataParallel(rank.model(2))
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = iter(DataLoader(Batches(rank), batch_size=None))
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            model(next(loader)).square().mean().backward()
            update.step()
            update.zero_grad()


BODIES: dict[str, Callable[[Rank, Any, int], None]] = {}
"""Of cases that another file holds."""
EDITED = {"throttled_clock", "allocation_retries", "memory_limit"}
"""Clean runs whose records are changed afterwards."""


def worker(names: list[str], folder: Path, num_steps: int, device: str) -> None:
    """One case after the other; each has a recorder and a folder of its own."""
    torch.set_num_threads(1)
    local = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    where = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
    for name in names:
        width, batch = (4096, 16) if device == "cuda" else (384, 16)
        rank = Rank(dist.get_rank(), where, width=width, batch=batch, depth=4)
        body = BODIES.get(name) or globals()["clean_ddp" if name in EDITED else name]
        gc.collect()
        gc.freeze()  # a full collection at a random step is a cause that nobody planted
        dist.barrier()
        with aorta.instrument(folder / name) as recorder:
            body(rank, recorder, num_steps)
    dist.destroy_process_group()


# ---- records that are changed ------------------------------------------------------------------


def edit(name: str, folder: Path) -> None:
    for path in sorted(folder.glob("rank_*_metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        rank = lines[0]["rank"]
        for number, line in enumerate(lines):
            _edit_line(name, rank, number, line)
            for key in ("line", "crc32"):
                line.pop(key, None)
        path.write_bytes(
            b"".join(sealed(msgspec.json.encode(line), number) for number, line in enumerate(lines))
        )
    path = folder / "run.json"
    run = json.loads(path.read_text())
    for row in run["devices"]:
        row |= {"kind": "cuda", "memory_bytes": 80 << 30, "name": "Invented GPU"}
    path.write_text(json.dumps(run))


def _edit_line(name: str, rank: int, number: int, line: dict[str, Any]) -> None:
    sample: dict[str, Any] = {"sample_unix_ns": line["start_unix_ns"], "sm_clock_mhz": 1980.0}
    memory = dict.fromkeys(("allocated_bytes", "reserved_bytes", "peak_allocated_bytes"), 40 << 30)
    memory["num_alloc_retries"] = 0
    if name == "throttled_clock" and rank == 1 and number > 10:
        sample |= {"sm_clock_mhz": 900.0, "throttling": ["hw_thermal_slowdown"]}
    if name == "allocation_retries":
        memory["num_alloc_retries"] = number // 3
    if name == "memory_limit":
        memory |= {"reserved_bytes": int(78.9 * 2**30), "device_used_bytes": int(79.4 * 2**30)}
    line["device"], line["memory"] = sample, memory


# ---- all cases ---------------------------------------------------------------------------------


def run_cases(names: list[str], folder: Path, num_steps: int, device: str, timeout_s: float) -> str:
    """Run them in one job of two ranks; what went wrong, '' where nothing did."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone",
        sys.argv[0], "--worker", *names, "--folder", str(folder), "--steps", str(num_steps),
        "--device", device,
    ]  # fmt: skip
    environment_ = module_environment() | {"OMP_NUM_THREADS": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(command, env=environment_, capture_output=True, timeout=timeout_s, text=True)
    except subprocess.TimeoutExpired:
        return f"not done within {timeout_s:.0f} s"
    return "" if done.returncode == 0 else done.stderr.strip()[-600:]


def why(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "aorta", "why", str(folder), "--json"],
        env=module_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-600:])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def is_right(case: Case, causes: list[dict[str, Any]]) -> bool:
    if case.expected is None:
        return not causes
    if not causes or causes[0]["kind"] != case.expected:
        return False
    return case.who is None or f"rank {case.who}" in causes[0]["subject"]


def trials(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    names = [name for name in options.cases if options.device in CASES[name].on]
    for repeat in range(options.repeats):
        place = folder / f"repeat_{repeat}"
        failure = run_cases(names, place, options.steps, options.device, options.timeout_s)
        with ThreadPoolExecutor(options.jobs) as pool:
            yield from pool.map(
                lambda name, repeat=repeat, place=place, failure=failure: trial(name, repeat, place, failure),
                names,
            )


def trial(name: str, repeat: int, place: Path, failure: str) -> dict[str, Any]:
    """What is said of a run that has been made."""
    row: dict[str, Any] = {"case": name, "repeat": repeat, "expected": CASES[name].expected}
    try:
        if name in EDITED:
            edit(name, place / name)
        answer = why(place / name)
    except (RuntimeError, subprocess.TimeoutExpired, ValueError, OSError) as error:
        return row | {"error": failure or str(error)}
    causes = answer["causes"]
    return row | {
        "is_right": is_right(CASES[name], causes),
        "step_ms": answer["step_ms"],
        "source": answer["source"],
        "causes": [
            {key: one[key] for key in ("kind", "subject", "ms", "share", "interval_ms", "evidence")}
            for one in causes
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for the cases of one repeat")
    parser.add_argument("--jobs", type=int, default=1, help="answers that are asked for at a time")
    parser.add_argument("--keep", type=Path, help="folder for the records")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.folder, options.steps, options.device)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in trials(options, options.keep or Path(folder)):
            rows.append(row)
            first = (row.get("causes") or [{}])[0]
            named = f"{first.get('kind')}: {first.get('subject')}" if first else "none"
            verdict = row.get("error") or ("right" if row["is_right"] else "WRONG")
            share = f"{100 * first['share']:.0f} %" if first else ""
            step = f"{row['step_ms']:8.1f} ms" if "step_ms" in row else ""
            print(f"{row['case']:22s} {verdict:6s} {step}  {named} {share}", flush=True)
    judged = [row for row in rows if "is_right" in row]
    planted = [row for row in judged if row["expected"] is not None]
    clean = [row for row in judged if row["expected"] is None]
    print(
        f"planted first: {sum(row['is_right'] for row in planted)} of {len(planted)};"
        f" clean without a cause: {sum(row['is_right'] for row in clean)} of {len(clean)}"
    )
    if options.output is not None:
        document = environment() | {"device": options.device, "steps": options.steps, "trials": rows}
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


if __name__ == "__main__":
    main()
