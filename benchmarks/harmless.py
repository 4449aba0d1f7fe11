"""Training with the instrument is bit-identical to training without it.

    torchrun --nproc_per_node 2 benchmarks/harmless.py --output harmless.csv

For DDP, FSDP2, TP, MoE and their products: 40 steps with deterministic algorithms and one seed, without a
recorder, with native and with dedicated placement in every step, and with native placement in one step of
three (sampled: what sees the program is put on and taken off). On GPUs native takes what sees collectives off
behind step 24; `unseen` says in how many steps that was so. Losses and parameters must be equal bit by bit.
On a CPU it runs with gloo. Takes a minute.
"""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import TINY, Job, config_of, process_group
from harness import arguments, write

import aorta
from aorta.launcher import launched_rank
from aorta.records.reader import read_steps

NUM_STEPS = 40


def main() -> None:
    parser = arguments(__doc__)
    here = [name for name in TINY if name != "tp_ep" or launched_rank().world_size % 4 == 0]
    parser.add_argument("--cases", nargs="+", default=here, choices=list(TINY))
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
    digest = hashlib.sha256()
    for parameter in job.run.form.plain.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    job.close()
    return {"losses": losses, "parameters": digest.hexdigest()}


if __name__ == "__main__":
    main()
