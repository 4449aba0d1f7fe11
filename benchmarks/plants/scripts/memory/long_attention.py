import torch
from model import SIZE, Decoder, loss_of, setup

device = setup()
model = Decoder(width=64, layers=3).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for length in (256, 512, 1024, 2048, 4096, 8192, 16384):
    for _ in range(3):
        tokens = torch.randint(512, (SIZE, length), device=device)
        loss = loss_of(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
