"""
cause: compute
told: detach\(\) what is called at made_not_detached.py:\d+ gives
"""

import torch
from measured import network, steps
from torch.nn.functional import binary_cross_entropy_with_logits

torch.set_num_threads(1)
maker, judge = network(features=64, classes=256), network(width=256, features=256, classes=1, layers=2)
of_maker = torch.optim.Adam(maker.parameters(), 1e-4, fused=True)
of_judge = torch.optim.Adam(judge.parameters(), 1e-4, fused=True)
real, yes, no = torch.rand(4096, 256), torch.ones(256, 1), torch.zeros(256, 1)
for _ in steps():
    made = maker(torch.randn(256, 64))
    of_judge.zero_grad()
    loss = binary_cross_entropy_with_logits(judge(real[torch.randint(4096, (256,))]), yes)
    loss = loss + binary_cross_entropy_with_logits(judge(made), no)
    # -> loss = loss + binary_cross_entropy_with_logits(judge(made.detach()), no)
    loss.backward(retain_graph=True)
    # -> loss.backward()
    of_judge.step()
    of_maker.zero_grad()
    binary_cross_entropy_with_logits(judge(made), yes).backward()
    of_maker.step()
