"""
cause: compute
told: ^torch.backends.cudnn.deterministic = False
device: cuda
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.backends.cudnn.deterministic = True
# ->
device = torch.device("cuda")
widths = [3, 64, 128, 128]
layers = [
    one
    for few, more in zip(widths, widths[1:], strict=False)
    for one in (nn.Conv2d(few, more, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
images, labels = torch.randn(64, 3, 128, 128, device=device), torch.randint(10, (64,), device=device)
for _ in steps(120):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
