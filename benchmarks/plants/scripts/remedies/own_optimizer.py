"""
cause: optimizer
told: Lion at own_optimizer.py:\d+ is none of torch.optim
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr=1e-4, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta})
        self.means = [torch.zeros_like(one) for one in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self):
        weights = self.param_groups[0]["params"]
        grads = [weight.grad for weight in weights]
        for weight, grad, mean in zip(weights, grads, self.means, strict=True):
            # -> torch._foreach_lerp_(self.means, grads, 0.1)
            # -> torch._foreach_add_(weights, torch._foreach_sign(self.means), alpha=-1e-4)
            mean.lerp_(grad, 0.1)
            # ->
            weight.add_(torch.sign(mean), alpha=-1e-4)
            # ->


torch.set_num_threads(1)
model = network(width=32, layers=120)
optimizer = Lion(model.parameters())
for _ in steps(150):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
