"""
cause: program_code
told: over many tensors at once, where the loop
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=48, layers=60)
means = [torch.zeros_like(one) for one in model.parameters()]
squares = [torch.zeros_like(one) for one in model.parameters()]
# -> optimizer = torch.optim.Adam(model.parameters(), lr=0.001, fused=True)
for step in steps(100):
    rows, labels = batch(16)
    cross_entropy(model(rows), labels).backward()
    # -> cross_entropy(model(rows), labels).backward()
    # -> optimizer.step()
    # -> optimizer.zero_grad()
    with torch.no_grad():
        # ->
        for weight, mean, square in zip(model.parameters(), means, squares, strict=True):
            # ->
            mean.mul_(0.9).add_(0.1 * weight.grad)
            # ->
            square.mul_(0.999).add_(0.001 * weight.grad**2)
            # ->
            scaled = mean / (1 - 0.9 ** (step + 1)) / ((square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
            # ->
            weight -= 0.001 * scaled
            # ->
            weight.grad = None
            # ->
