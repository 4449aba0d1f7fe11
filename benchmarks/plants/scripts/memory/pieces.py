import torch
from model import Decoder, loss_of, setup

device = setup()
model = Decoder().to(device)
optimizer = torch.optim.AdamW(model.parameters())
cached, passing = [], []
for step in range(2000):
    tokens = torch.randint(512, (4, 64), device=device)
    loss = loss_of(model(tokens), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for _ in range(4):  # samples, of which every third one is kept
        cached.append(torch.zeros(1 << 19, device=device))
        passing += [torch.zeros(15 << 17, device=device) for _ in range(2)]
    if step % 8 == 7:
        passing.clear()
        whole = torch.zeros(64 << 20, device=device)
        del whole
