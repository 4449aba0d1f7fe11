"""Training with the instrument is bit-identical to training without it.

    torchrun --nproc_per_node 2 benchmarks/harmless.py --output harmless.csv

For DDP, FSDP2, TP, MoE and their products: 40 steps with deterministic algorithms and one seed, without a
recorder, with native and with dedicated placement in every step, and with native placement in one step of
three (sampled: what sees the program is put on and taken off). On GPUs native takes what sees collectives off
behind step 24; `unseen` says in how many steps that was so. Losses and parameters must be equal bit by bit.
One more case, `loader`, takes batches of two workers of a DataLoader that draw random numbers.
On a CPU it runs with gloo. Takes a minute.
"""

import hashlib
import random
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cases import TINY, Job, config_of, process_group
from harness import arguments, write
from torch.utils.data import DataLoader, Dataset

import aorta
from aorta.launcher import launched_rank
from aorta.records.reader import read_steps

NUM_STEPS = 40
LOADER = "loader"


def main() -> None:
    parser = arguments(__doc__)
    here = [name for name in TINY if name != "tp_ep" or launched_rank().world_size % 4 == 0]
    here.append(LOADER)
    parser.add_argument("--cases", nargs="+", default=here, choices=[*TINY, LOADER])
    options = parser.parse_args()
    results = []
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            runs = {
                variant: train(name, variant, device, Path(folder))
                for variant in ("off", "again", "native", "dedicated", "sampled")
            }
            equal: list[Any] = [None] * dist.get_world_size()
            mine = {variant: run == runs["off"] for variant, run in runs.items() if variant != "off"}
            dist.all_gather_object(equal, mine)
            same = {variant: all(rank[variant] for rank in equal) for variant in mine}
            unseen = sum(
                step.calls_learned
                for step in read_steps(
                    Path(folder) / f"{name}-native" / f"rank_{dist.get_rank()}_metrics.jsonl", []
                )
            )
            results.append({"case": name, "bit_identical_to_off": same, "unseen": unseen})
            if dist.get_rank() == 0:
                print(f"{name:6s} bit-identical to a run without: {same}, unseen {unseen}", flush=True)
        if dist.get_rank() == 0:
            write(options.output, results)
    if not all(all(result["bit_identical_to_off"].values()) for result in results):
        raise SystemExit(1)


def train(name: str, variant: str, device: torch.device, folder: Path) -> dict[str, Any]:
    """Losses and a digest of all parameters of this rank."""
    if name == LOADER:
        return train_of_loader(variant, device, folder)
    job = Job(config_of(TINY[name], deterministic=True, seed=7), device)
    if variant in ("off", "again"):
        for _ in range(NUM_STEPS):
            job.step()
    else:
        placement: Any = "dedicated" if variant == "dedicated" else "native"
        with aorta.instrument(folder / f"{name}-{variant}", placement=placement, overhead="off") as recorder:
            if variant == "sampled":
                sampling = recorder._sampling
                sampling.begin = lambda global_step: global_step % 3 == 0  # type: ignore[method-assign]
                sampling.comes_next = lambda: True  # type: ignore[method-assign]
            for _ in range(NUM_STEPS):
                job.step(recorder)
    losses = [float(loss) for loss in job.losses]
    digest = digest_of(job.run.form.plain)
    job.close()
    return {"losses": losses, "parameters": digest}


def digest_of(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


class Drawn(Dataset[torch.Tensor]):
    """Rows of all generators that a worker has."""

    def __len__(self) -> int:
        return 4 * NUM_STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(64) + float(np.random.standard_normal()) + random.random()


def train_of_loader(variant: str, device: torch.device, folder: Path) -> dict[str, Any]:
    """Two epochs, of workers that start anew in each."""
    torch.manual_seed(7)
    random.seed(7)
    model = torch.nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[torch.Tensor] = []

    def epochs(recorder: Any) -> None:
        for _ in range(2):
            for batch in DataLoader(Drawn(), batch_size=8, shuffle=True, num_workers=2):
                with nullcontext() if recorder is None else recorder.step():
                    loss = model(batch.to(device)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.detach())

    if variant in ("off", "again"):
        epochs(None)
    else:
        placement: Any = "dedicated" if variant == "dedicated" else "native"
        with aorta.instrument(
            folder / f"{LOADER}-{variant}", placement=placement, overhead="off"
        ) as recorder:
            epochs(recorder)
    drawn = random.random(), float(torch.rand(())), *map(float, losses)
    return {"losses": drawn, "parameters": digest_of(model)}


if __name__ == "__main__":
    main()
