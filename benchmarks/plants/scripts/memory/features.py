import torch
from model import SIZE, Decoder, loss_of, setup


class Probed(Decoder):
    def __init__(self):
        super().__init__()
        self.features = []

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        self.features.append(x)  # LINE
        return self.head(x)


device = setup()
model = Probed().to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2000):
    tokens = torch.randint(512, (4 * SIZE, 64), device=device)
    loss = loss_of(model(tokens), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
