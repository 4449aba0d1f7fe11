"""Trains a decoder of compiled blocks with deterministic kernels: compiled_blocks.py WRAPS FILE

WRAPS is plain, DDP or fully_shard (one process a GPU), or DataParallel (one process for all). Rank 0 writes
what the training came to into FILE: a loss a step, and a digest of its parameters.
"""

import hashlib
import json
import os
import sys

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before the first handle of cuBLAS

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel

D, LAYERS, VOCABULARY, NUM_STEPS = 256, 4, 1000, 60


@torch.compile
def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(D), nn.Linear(2 * D, D)
        self.up, self.gated = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.out(gate(self.gated(h), self.up(h)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(VOCABULARY, D), nn.Linear(D, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.embed(rows)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(wraps: str, file: str) -> None:
    in_group = wraps in ("DDP", "fully_shard")
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if in_group:
        dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    model = Decoder().to(device)
    if wraps != "DataParallel":
        for block in model.blocks:
            block.compile()
    called: nn.Module = model
    if wraps == "DDP":
        called = DistributedDataParallel(model, device_ids=[device.index])
    elif wraps == "DataParallel":
        called = DataParallel(model)
    elif wraps == "fully_shard":
        for module in (*model.blocks, model):
            fully_shard(module)
    optimizer = torch.optim.AdamW(called.parameters(), lr=1e-3)
    rows = torch.Generator(device).manual_seed(rank)
    losses = []
    for _ in range(NUM_STEPS):
        ids = torch.randint(VOCABULARY, (64,), generator=rows, device=device)
        logits = called(F.one_hot(ids, VOCABULARY).float())
        loss = F.cross_entropy(logits, ids.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().cpu().numpy().tobytes())
    if rank == 0:
        with open(file, "w") as out:
            json.dump({"losses": losses, "parameters": digest.hexdigest()}, out)
    if in_group:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
