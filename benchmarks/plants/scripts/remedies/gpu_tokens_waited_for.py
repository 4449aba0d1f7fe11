"""
cause: synchronisation
told: prepare the next batch on the host while the device works on this one
device: cuda
trace: true
"""

import torch
from measured import network, place, steps

device = place()
model = network(width=4096, layers=24, features=1024, classes=8192).to(device, torch.bfloat16).eval()
table = torch.randn(8192, 1024, device=device, dtype=torch.bfloat16)
tokens = torch.zeros(4096, device=device, dtype=torch.int64)
texts, words = [], [f"word{number}" for number in range(8192)]
with torch.inference_mode():
    kept = tokens.cpu()
    for _ in steps(200):
        tokens = model(table[tokens]).argmax(dim=1)
        texts.append(" ".join(sorted(words[number] for number in tokens.tolist())))
        # -> texts.append(" ".join(sorted(words[number] for number in kept.tolist())))
        # -> kept = tokens.cpu()
