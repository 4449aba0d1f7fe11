"""
cause: compute
told: is_causal=True. in place of attn_mask
device: cuda
"""

import torch
from measured import place, steps
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

device = place()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(512, 1536), nn.Linear(512, 512)

    def forward(self, x, mask):
        q, k, v = self.inner(x).view(*x.shape[:2], 3, 8, 64).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        # -> mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.outer(mixed.transpose(1, 2).reshape(x.shape))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        for layer in self.layers:
            x = layer(x, mask)
        return x


model = Net().to(device, torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
x = torch.randn(8, 2048, 512, device=device, dtype=torch.bfloat16)
for _ in steps(120):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
