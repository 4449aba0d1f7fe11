"""A training loop with a planted change, for `aorta ab`: WORK layers in each step, of which one is 1 % where
WORK is 100.

    aorta ab -n 24 --metric cpu_ms --env WORK=100,103 -- python benchmarks/planted_loop.py
    bash benchmarks/ab_on_gpus.sh OUT                  1 % and nothing, each series on a GPU of its own

One process on a CPU; under torchrun on GPUs, with its gradients reduced.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = {"cpu": 160, "cuda": 60}


class Layers(nn.Module):
    """One layer, again and again."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.layer, self.num = nn.Linear(width, width), num

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num):
            x = torch.tanh(self.layer(x))
        return x.square().mean()


def main() -> None:
    num = int(os.environ.get("WORK", "100"))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        device = torch.device("cpu")
    # On a GPU so wide that the device and not its host sets the pace.
    width, batch = (4096, 4096) if kind == "cuda" else (96, 64)
    model: nn.Module = Layers(width, num).to(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(batch, width, device=device)
    for _ in range(STEPS[kind]):
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
