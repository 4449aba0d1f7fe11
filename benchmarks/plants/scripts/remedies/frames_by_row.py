"""
cause: program_code|between_steps
told: take columns as arrays once
library: pandas
"""

import numpy as np
import pandas
import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
frame = pandas.DataFrame(np.random.rand(10_000, 64).astype("float32"))
columns = torch.from_numpy(frame.to_numpy())
for _ in steps():
    _, labels = batch(768)
    chosen = torch.randint(10_000, (768,)).tolist()
    rows = torch.stack([torch.from_numpy(frame.iloc[index].to_numpy()) for index in chosen])
    # -> rows = columns[chosen]
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
