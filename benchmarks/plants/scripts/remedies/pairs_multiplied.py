"""
cause: compute
told: multiply first, and repeat what that gives
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)


class Relations(nn.Module):
    """Looks at all pairs of a scene's objects."""

    def __init__(self):
        super().__init__()
        self.object, self.head = nn.Linear(16, 64), nn.Linear(128, 10)
        self.pair = nn.Linear(128, 128)
        # -> self.first, self.second = nn.Linear(64, 128), nn.Linear(64, 128, bias=False)

    def forward(self, objects):
        x = self.object(objects).relu()
        num = x.shape[1]
        pairs = torch.cat(
            # ->
            [x.unsqueeze(1).expand(-1, num, -1, -1), x.unsqueeze(2).expand(-1, -1, num, -1)],
            # ->
            dim=-1,
            # ->
        )
        # ->
        seen = self.pair(pairs).relu()
        # -> seen = (self.first(x).unsqueeze(1) + self.second(x).unsqueeze(2)).relu()
        return self.head(seen.mean((1, 2)))


model = Relations()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    objects, labels = torch.randn(16, 24, 16), torch.randint(10, (16,))
    optimizer.zero_grad()
    cross_entropy(model(objects), labels).backward()
    optimizer.step()
