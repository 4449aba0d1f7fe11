"""
cause: optimizer
told: fused=True is in force. fewer and larger parameters
"""

import torch
from measured import steps

torch.set_num_threads(1)
NUM, SIZE = 6000, 64
# -> NUM, SIZE = 6, 64000
weights = [torch.zeros(SIZE, requires_grad=True) for _ in range(NUM)]
optimizer = torch.optim.Adam(weights, fused=True)
for weight in weights:
    weight.grad = torch.ones(SIZE)
for _ in steps(100):
    torch.randn(300, 300) @ torch.randn(300, 300)
    optimizer.step()
