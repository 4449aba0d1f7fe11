"""
cause: compute
told: scaled_dot_product_attention
device: cuda
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(512, 8, batch_first=True)
        self.up, self.down = nn.Linear(512, 1024), nn.Linear(1024, 512)

    def forward(self, x):
        y, _ = self.attention(x, x, x)
        # -> y, _ = self.attention(x, x, x, need_weights=False)
        return x + self.down(self.up(x + y).relu())


device = torch.device("cuda")
model = nn.Sequential(*(Layer() for _ in range(6)), nn.Linear(512, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows, labels = torch.randn(16, 1024, 512, device=device), torch.randint(10, (16, 1024), device=device)
for _ in steps(80):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = cross_entropy(model(rows).transpose(1, 2), labels)
    loss.backward()
    optimizer.step()
