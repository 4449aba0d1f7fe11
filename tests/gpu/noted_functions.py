"""Trains what transforms, casts and copies, with deterministic kernels: noted_functions.py FILE

In one process, or DDP's ranks. Rank 0 writes what the training came to into FILE: a loss a step, a digest of
its parameters, and whether torch's functions are its own behind the training.
"""

import hashlib
import json
import os
import sys

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before the first handle of cuBLAS

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

LENGTH, NUM_STEPS = 2_311, 60
ORIGINALS = torch.fft.rfft, torch.Tensor.float, torch.Tensor.flatten


class Filters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), parametrizations.weight_norm(nn.Linear(16, 4))
        self.filters = nn.Parameter(torch.randn(16, LENGTH) / LENGTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).transpose(1, 2).contiguous()
        y = torch.fft.irfft(torch.fft.rfft(y) * torch.fft.rfft(self.filters), n=LENGTH)
        return self.down(y.transpose(1, 2).flatten(0, 1)).float()


def main(file: str) -> None:
    torch.use_deterministic_algorithms(True)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model: nn.Module = Filters().to(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        model = DistributedDataParallel(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(NUM_STEPS):
        torch.manual_seed(1000 * rank + step)
        x = torch.randn(8, LENGTH, 4, dtype=torch.float64).float().to(device)
        optimizer.zero_grad()
        # Twice in one pass, as a loop over time calls it.
        loss = (model(x) - x.flatten(0, 1)).square().mean() + model(0.5 * x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    are_own = (torch.fft.rfft, torch.Tensor.float, torch.Tensor.flatten) == ORIGINALS
    are_own = are_own and not {"float", "flatten", "contiguous"} & set(vars(torch.Tensor))
    if rank == 0:
        with open(file, "w") as out:
            json.dump({"losses": losses, "parameters": digest.hexdigest(), "are_own": are_own}, out)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
