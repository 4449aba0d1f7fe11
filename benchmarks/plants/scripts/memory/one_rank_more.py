import torch
import torch.distributed as dist
from model import ON_GPU, SIZE, Decoder, loss_of, setup
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl" if ON_GPU else "gloo")
device = setup()
model = DistributedDataParallel(Decoder().to(device))
optimizer = torch.optim.AdamW(model.parameters())
documents = 4 if dist.get_rank() == 0 else 14
for step in range(2000):
    tokens = torch.randint(512, (documents * SIZE, 64 + 2 * step), device=device)
    loss = loss_of(model(tokens), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
