import torch
from model import SIZE, Decoder, loss_of, setup


def evaluate(model, device):
    model.eval()
    scores = []
    for _ in range(400):
        tokens = torch.randint(512, (4 * SIZE, 64), device=device)
        scores.append(loss_of(model(tokens), tokens))  # LINE
    model.train()
    return torch.stack(scores).mean()


device = setup()
model = Decoder().to(device)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(60):
    tokens = torch.randint(512, (4 * SIZE, 64), device=device)
    loss = loss_of(model(tokens), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(step, evaluate(model, device).item())
