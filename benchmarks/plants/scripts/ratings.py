"""Predict ratings from many small tables. Data-parallel by hand: gradients are averaged after backward."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=60)
p.add_argument("--fields", type=int, default=24)
p.add_argument("--batch", type=int, default=512)
p.add_argument("--average", choices=["each", "flat"], default="flat")
p.add_argument("--optimizer", choices=["adam", "fused"], default="fused")
p.add_argument("--share-ids", choices=["objects", "tensor"])
p.add_argument("--wait-for-lock", action="store_true", help="all ranks poll for the feature store's lock")
args = p.parse_args()

dist.init_process_group(backend="gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(200, 16)
        self.scale, self.shift = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))
        self.gate = nn.Linear(16, 16)

    def forward(self, ids):
        x = self.table(ids) * self.scale + self.shift
        return x * torch.sigmoid(self.gate(x))


class Ratings(nn.Module):
    def __init__(self):
        super().__init__()
        self.fields = nn.ModuleList(Field() for _ in range(args.fields))
        self.tower = nn.Sequential(nn.Linear(16 * args.fields, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids):
        return self.tower(torch.cat([f(ids[:, i]) for i, f in enumerate(self.fields)], 1)).squeeze(1)


def average_gradients(model):
    if args.average == "each":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        return
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)
    flat /= world
    for parameter, part in zip(
        model.parameters(), flat.split([q.numel() for q in model.parameters()]), strict=True
    ):
        parameter.grad.copy_(part.view_as(parameter))


model = Ratings()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=args.optimizer == "fused")
generator = torch.Generator().manual_seed(rank)
for step in range(args.steps):
    if step == 5:
        start = time.time()
    if args.wait_for_lock:
        until = time.time() + 0.02
        while time.time() < until:
            time.sleep(0.005)
    ids = torch.randint(200, (args.batch, args.fields), generator=generator)
    target = ids.float().mean(1) / 100
    loss = nn.functional.mse_loss(model(ids), target)
    loss.backward()
    average_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    if args.share_ids == "objects":  # every rank learns which rows were seen
        seen = [None] * world
        dist.all_gather_object(seen, [{"row": int(i), "step": step} for i in ids.flatten()[:6000]])
    elif args.share_ids == "tensor":
        everyone = [torch.empty_like(ids) for _ in range(world)]
        dist.all_gather(everyone, ids)
if rank == 0:
    print(f"{(time.time() - start) / (args.steps - 5) * 1e3:.2f} ms a step, loss {loss.item():.4f}")
dist.barrier()
