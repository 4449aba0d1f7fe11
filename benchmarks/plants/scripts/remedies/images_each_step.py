"""
cause: program_code|between_steps
told: decode images once
library: PIL
"""

import io

import numpy as np
import torch
from measured import batch, network, steps
from PIL import Image
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
packed = io.BytesIO()
Image.fromarray(np.random.randint(0, 255, (800, 800, 3), dtype=np.uint8)).save(packed, "JPEG")
image = Image.open(packed).convert("RGB").resize((8, 8))
for _ in steps():
    rows, labels = batch()
    image = Image.open(packed).convert("RGB").resize((8, 8))
    # ->
    rows = rows + torch.from_numpy(np.asarray(image)[:, :, 0].copy()).view(64) / 255
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
