import torch
import torch.distributed as dist
from model import ON_GPU, Decoder, loss_of, setup
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl" if ON_GPU else "gloo")
device = setup()
model = DistributedDataParallel(Decoder(width=256, layers=6).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
snapshots = []
for step in range(400):
    tokens = torch.randint(512, (2, 32), device=device)
    loss = loss_of(model(tokens), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 2:
        weights = {name: value.clone() for name, value in model.module.state_dict().items()}
        snapshots.append(weights)  # LINE
