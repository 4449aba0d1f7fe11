"""A decoder sharded or replicated in units of a size: prints what a step takes, on two ranks and more.

    MODE=f2_linear,f2_block torchrun --nproc_per_node 2 sharded.py              one after the other
    MODE=f2_linear aorta run -- torchrun --nproc_per_node 2 sharded.py          one recorded

fully_shard of each Linear, of each half block, of each block (f2_linear, f2_half, f2_block);
FullyShardedDataParallel (f1_linear, f1_block); DistributedDataParallel with small buckets or usual ones
(ddp_small, ddp); beside it ZeroRedundancyOptimizer (zero, zero_flat: parameters as one bucket). On a CPU:
SHAPE=64,4,8,256 BATCH=2,32.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

DIM, HEADS, BLOCKS, VOCAB = (int(x) for x in os.environ.get("SHAPE", "768,12,16,8192").split(","))
BATCH, LENGTH = (int(x) for x in os.environ.get("BATCH", "8,512").split(","))
CUDA = torch.cuda.is_available()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.feed = Attention(), Feed()

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.feed(self.n2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def wrapped(model, mode):
    if mode.startswith("f2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cuda" if CUDA else "cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if CUDA else MixedPrecisionPolicy()
        kinds = {"f2_linear": nn.Linear, "f2_half": (Attention, Feed), "f2_block": Block}[mode]
        for module in model.modules():
            if isinstance(module, kinds):
                fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    if mode.startswith("f1"):
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        kinds = {"f1_linear": {nn.Linear}, "f1_block": {Block}, "f1_whole": set()}[mode]
        mixed = MixedPrecision(param_dtype=torch.bfloat16) if CUDA else None
        device = torch.cuda.current_device() if CUDA else torch.device("cpu")
        policy = ModuleWrapPolicy(kinds) if kinds else None
        return FSDP(
            model, auto_wrap_policy=policy, mixed_precision=mixed, use_orig_params=True, device_id=device
        )
    from torch.nn.parallel import DistributedDataParallel as DDP

    if mode == "ddp_small":
        return DDP(model, bucket_cap_mb=0.05)
    return DDP(model)


def train(mode, steps, warm):
    torch.manual_seed(0)
    model = Decoder()
    model = wrapped(model.cuda() if CUDA else model, mode)
    if mode.startswith("zero"):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-4, parameters_as_bucket_view=mode == "zero_flat"
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    device = "cuda" if CUDA else "cpu"
    times = []
    for step in range(steps):
        ids = torch.randint(VOCAB, (BATCH, LENGTH + 1), device=device)
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=CUDA and not mode.startswith("f")):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            loss.item()
        times.append((time.perf_counter() - began) * 1e3)
        if step == warm:
            if CUDA:
                torch.cuda.synchronize()
            start = time.perf_counter()
    if CUDA:
        torch.cuda.synchronize()
    all_ms = (time.perf_counter() - start) * 1e3 / (steps - warm - 1)
    if dist.get_rank() == 0:
        what, usual_ms = os.environ.get("WHAT", "plain"), statistics.median(times[warm:])
        print(f"{what} {mode} {all_ms:.2f} ms a step (median {usual_ms:.2f})", flush=True)


def main():
    dist.init_process_group("nccl" if CUDA else "gloo")
    if CUDA:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
    steps = int(os.environ.get("STEPS", "60"))
    modes = os.environ["MODE"].split(",")
    for mode in modes:
        train(mode, steps, steps // 4)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
