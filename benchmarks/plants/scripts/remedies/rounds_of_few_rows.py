"""
cause: program_code|pause
told: take more rows in each round
"""

import torch
from measured import network, steps
from torch.distributions import Categorical

torch.set_num_threads(1)
torch.manual_seed(1)
model = network(width=64, layers=1, features=8, classes=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
at_a_time = 1
# -> at_a_time = 64
for _ in steps(120):
    states, actions, gains = [torch.randn(at_a_time, 8)], [], []
    with torch.no_grad():
        for _round in range(128 // at_a_time):
            action = Categorical(logits=model(states[-1])).sample()
            moved = 0.9 * states[-1] + 0.1 * torch.randn(at_a_time, 8)
            gains.append(moved[:, 0] * (action - 1.5))
            actions.append(action)
            states.append(moved)
    seen = Categorical(logits=model(torch.cat(states[:-1])))
    optimizer.zero_grad()
    (-seen.log_prob(torch.cat(actions)) * torch.cat(gains)).mean().backward()
    optimizer.step()
