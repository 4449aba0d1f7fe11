"""
cause: launch_bound
told: replay the forward pass as a CUDA or HIP graph
device: cuda
trace: true
"""

import torch
from measured import network, place, steps

device = place()
model = network(width=1024, layers=48, features=1024, classes=1024).to(device, torch.bfloat16).eval()
given = torch.randn(1, 1024, device=device, dtype=torch.bfloat16)
with torch.inference_mode():
    for _ in range(3):
        found = model(given)
    # -> graph = torch.cuda.CUDAGraph()
    # -> with torch.cuda.graph(graph):
    # ->     found = model(given)
    for _ in steps(400):
        found = model(given)
        # -> graph.replay()
        given.copy_(torch.tanh(found))
