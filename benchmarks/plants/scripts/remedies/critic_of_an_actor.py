"""
cause: compute
told: requires_grad_\(False\) for the parameters of what is called at .+, before
"""

import torch
from measured import network, steps
from torch.nn.functional import mse_loss

torch.set_num_threads(1)
actor, critic = network(width=128, classes=16, layers=1), network(features=80, classes=1)
of_actor = torch.optim.Adam(actor.parameters(), 1e-4, fused=True)
of_critic = torch.optim.Adam(critic.parameters(), 1e-4, fused=True)
seen, done, rewards = torch.randn(8192, 64), torch.randn(8192, 16), torch.randn(8192, 1)
for _ in steps():
    some = torch.randint(8192, (256,))
    of_critic.zero_grad()
    mse_loss(critic(torch.cat([seen[some], done[some]], 1)), rewards[some]).backward()
    of_critic.step()
    critic.requires_grad_(True)
    # -> critic.requires_grad_(False)
    loss = -critic(torch.cat([seen[some], actor(seen[some])], 1)).mean()
    of_actor.zero_grad()
    loss.backward()
    of_actor.step()
    critic.requires_grad_(True)
