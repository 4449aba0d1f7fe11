"""
cause: compute
told: ^multiply first, and repeat what that gives.* at .*maps_repeated.py:\d+
"""

import torch
from measured import steps
from torch import nn

torch.set_num_threads(1)


class Points(nn.Module):
    """Labels each of some points by what is known of it and of all."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(3, 64, 1), nn.Conv1d(64, 256, 1)
        self.of_all, self.of_each = nn.Linear(256, 128), nn.Conv1d(64, 128, 1)
        self.joined, self.last = nn.Conv1d(64 + 256, 128, 1), nn.Conv1d(128, 8, 1)

    def forward(self, points):
        each = torch.relu(self.first(points))
        of_all = torch.relu(self.second(each)).amax(2, keepdim=True)
        joined = self.joined(torch.cat([each, of_all.expand(-1, -1, points.shape[2])], 1))
        # -> joined = self.of_each(each) + self.of_all(of_all.squeeze(2)).unsqueeze(2)
        return self.last(torch.relu(joined))


model = Points()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(100):
    points, labels = torch.randn(8, 3, 1024), torch.randint(8, (8, 1024))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(points), labels).backward()
    optimizer.step()
