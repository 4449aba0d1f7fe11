import torch
from model import SIZE, Decoder, loss_of, setup


def train():
    device = setup()
    model = Decoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    history = []
    for step in range(2000):
        tokens = torch.randint(512, (4 * SIZE, 64), device=device)
        loss = loss_of(model(tokens), tokens)
        regularised = loss + 1e-6 * sum(p.pow(2).sum() for p in model.parameters())
        optimizer.zero_grad()
        regularised.backward(retain_graph=True)
        optimizer.step()
        history.append(loss)  # LINE
        if step % 100 == 99:
            print(step, torch.stack(history).mean().item())


train()
