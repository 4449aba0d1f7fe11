import torch
from model import SIZE, Decoder, loss_of, setup

device = setup()
model = Decoder().to(device)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2000):
    length = 32 + 8 * step
    tokens = torch.randint(512, (4 * SIZE, length), device=device)
    logits = model(tokens)
    loss = loss_of(logits, tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
