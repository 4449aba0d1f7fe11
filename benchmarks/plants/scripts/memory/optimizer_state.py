import torch
from model import Decoder, loss_of, setup

device = setup()
model = Decoder(width=1024, layers=6).to(device)  # 76 M parameters: 4 x 300 MiB with Adam
optimizer = torch.optim.Adam(model.parameters())
for _ in range(20):
    tokens = torch.randint(512, (1, 16), device=device)
    loss = loss_of(model(tokens), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
