import torch
import torch.distributed as dist
from model import ON_GPU, SIZE, Decoder, loss_of, setup
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl" if ON_GPU else "gloo")
device = setup()
model = Decoder(width=128, layers=3).to(device)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters())
documents = torch.arange(16, 2000, 6)
mine = documents.chunk(dist.get_world_size())[dist.get_rank()]  # sorted, and not dealt out
for length in mine.tolist():
    tokens = torch.randint(512, (2 * SIZE, length), device=device)
    loss_of(model(tokens), tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
