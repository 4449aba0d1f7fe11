"""A small GPT trained on characters of a file, in one script: sampled batches, accumulation, estimates."""

import math
import os
import tempfile

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

BLOCK, BATCH, WIDTH, LAYERS, HEADS = 64, 12, 96, 4, 4
MICRO, STEPS, EVAL_EVERY, EVAL_BATCHES = 2, 60, 20, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            one.view(batch, length, HEADS, -1).transpose(1, 2) for one in self.attn(self.ln_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


folder = tempfile.mkdtemp()
path = os.path.join(folder, "train.bin")
np.random.default_rng(0).integers(0, 65, 1_000_000, dtype=np.uint16).tofile(path)


def get_batch():
    data = np.memmap(path, dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - BLOCK, (BATCH,))
    x = torch.stack([torch.from_numpy(data[i : i + BLOCK].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in starts])
    return x, y


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch())[1].item() for _ in range(EVAL_BATCHES)]
    model.train()
    return sum(losses) / len(losses)


def get_lr(step):
    return 1e-3 * min(step / 10, 0.5 * (1 + math.cos(math.pi * step / STEPS)))


model = GPT(65)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
best = float("inf")
X, Y = get_batch()
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    if step % EVAL_EVERY == 0:
        loss = estimate_loss()
        if loss < best:
            best = loss
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, os.path.join(folder, "ckpt.pt"))
    for _ in range(MICRO):
        logits, loss = model(X, Y)
        X, Y = get_batch()
        (loss / MICRO).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
