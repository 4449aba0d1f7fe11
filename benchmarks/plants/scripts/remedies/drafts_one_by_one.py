"""
cause: pause
told: make fewer of them, each on more rows
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import mse_loss

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, _ = batch(64)
    model.eval()
    with torch.no_grad():
        drafts = torch.cat([model(row) for row in rows.split(1)])
        # -> drafts = model(rows)
    model.train()
    optimizer.zero_grad()
    mse_loss(model(rows + 0.1 * torch.randn_like(rows)), drafts).backward()
    optimizer.step()
