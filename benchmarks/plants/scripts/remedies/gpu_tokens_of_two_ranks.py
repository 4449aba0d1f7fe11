"""
cause: transfer|small_messages
told: a one-shot or fused all_reduce where the server has one, fewer ranks for one model, or larger batches
device: cuda
ranks: 2
trace: true
"""

import torch
import torch.distributed as dist
from measured import place, steps

ROWS = 8
# -> ROWS = 64
device = place()
inner = [torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) / 64 for _ in range(6)]
rows = torch.randn(ROWS, 4096, device=device, dtype=torch.bfloat16)
with torch.inference_mode():
    for _ in steps(300, work=ROWS / 8):
        hidden = rows
        for weight in inner:
            hidden = torch.tanh(hidden @ weight)
            dist.all_reduce(hidden)
dist.destroy_process_group()
