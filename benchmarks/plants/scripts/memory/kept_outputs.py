import torch
from model import SIZE, Decoder, loss_of, setup

device = setup()
model = Decoder().to(device)
optimizer = torch.optim.AdamW(model.parameters())
predictions = []
for _ in range(2000):
    tokens = torch.randint(512, (4 * SIZE, 64), device=device)
    logits = model(tokens)
    loss = loss_of(logits, tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    predictions.append(logits.detach())  # LINE
