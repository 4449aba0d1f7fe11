import torch
from model import SIZE, Decoder, loss_of, setup

device = setup()
model = Decoder(words=16384, width=64, layers=2).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
    for _ in range(3):
        tokens = torch.randint(512, (batch * SIZE, 64), device=device)
        loss = loss_of(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
