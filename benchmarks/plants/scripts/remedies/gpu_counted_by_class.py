"""
cause: synchronisation|program_code
told: (make what the loop around .* reads in its rounds one tensor|keep values in tensors)
device: cuda
"""

import torch
from measured import steps
from torch import nn

device, classes = torch.device("cuda"), 64
layers = [one for _ in range(6) for one in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *layers, nn.Conv2d(64, classes, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images = torch.randn(8, 3, 256, 256, device=device)
labels = torch.randint(classes, (8, 256, 256), device=device)
right = [0] * classes
# -> right = torch.zeros(classes, dtype=torch.int64, device=device)


def count(outputs):
    global right
    found = outputs.detach().argmax(1)
    for one in range(classes):
        # -> right += torch.bincount(labels.flatten(), (found == labels).flatten().float(), classes).long()
        right[one] += ((found == one) & (labels == one)).sum().item()
        # ->


for _ in steps(100):
    outputs = model(images)
    loss = nn.functional.cross_entropy(outputs, labels)
    count(outputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
