"""Train a small classifier of notes in one process; options are what somebody added to the loop."""

import argparse
import copy
import hashlib
import json
import logging
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=60)
p.add_argument("--add", default="")
opt = p.parse_args()

VOCAB, LENGTH, BATCH, DIM = 400, 48, 32, 160
folder = tempfile.mkdtemp()
texts = [" ".join(f"w{(i * 7 + j * j) % VOCAB}" for j in range(LENGTH)) for i in range(512)]
tokens = torch.tensor([[int(word[1:]) for word in text.split()] for text in texts])
labels = torch.randint(8, (len(texts),))


class Notes(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, 0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(DIM, 8)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def batch(step):
    index = torch.arange(step * BATCH, (step + 1) * BATCH) % len(texts)
    if opt.add == "tokenize":
        rows = []
        for i in index.tolist():
            words = re.sub(r"[^a-z0-9 ]", "", texts[i]).split()
            for _ in range(14):
                rows_of_text = [int(word.strip("w")) for word in words if re.match(r"w\d+", word)]
            rows.append(rows_of_text)
        return torch.tensor(rows), labels[index]
    return tokens[index], labels[index]


def moving_average(model, averaged):
    with torch.no_grad():
        for _ in range(6):
            for mine, theirs in zip(averaged.parameters(), model.parameters(), strict=True):
                mine.mul_(0.99).add_(theirs, alpha=0.01)


def confusion(logits, y):
    table = np.zeros((8, 8))
    guessed = logits.detach().softmax(-1)
    for _ in range(40):
        for row, label in zip(guessed, y, strict=True):
            table[int(label), int(row.argmax())] += 1
    return table


def checksum(model):
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        for _ in range(8):
            digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def sparsity(model):
    report = {}
    for name, weight in model.named_parameters():
        report[name] = np.quantile(weight.detach().abs().numpy(), np.linspace(0, 1, 40)).tolist()
    return report


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.012)  # a probe that was left in
        return gradient


class Uploader(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.jobs, self.done = queue.Queue(), queue.Queue()

    def run(self):
        while True:
            self.jobs.get()
            time.sleep(0.015)
            self.done.put(1)


def publish(uploader, loss):
    uploader.jobs.put(loss)
    uploader.done.get()


torch.manual_seed(0)
torch.set_num_threads(1)
model = Notes()
optimizer = torch.optim.AdamW(
    model.parameters(), lr=1e-3, foreach=False if opt.add == "loop" else None, fused=opt.add != "loop"
)
averaged = copy.deepcopy(model)
uploader = Uploader()
uploader.start()
log = logging.getLogger("notes")
handler = logging.FileHandler(os.path.join(folder, "log.txt"))
log.addHandler(handler)
torch.autograd.set_detect_anomaly(opt.add == "anomaly")

for step in range(opt.steps):
    if step == 5:
        start = time.perf_counter()
    x, y = batch(step)
    logits = model(x)
    if opt.add == "probe":
        logits = Slow.apply(logits)
    loss = F.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    if opt.add == "nan_check":
        for _ in range(25):
            assert not any(torch.isnan(q.grad).any().item() for q in model.parameters())
    optimizer.step()
    if opt.add == "average":
        moving_average(model, averaged)
    elif opt.add == "confusion":
        table = confusion(logits, y)
    elif opt.add == "checksum":
        log.warning(checksum(model))
    elif opt.add == "sparsity":
        log.warning(json.dumps(sparsity(model)))
    elif opt.add == "copy":
        best = [copy.deepcopy(model.state_dict()) for _ in range(6)]
    elif opt.add == "fsync":
        for _ in range(4):
            log.warning("loss %s", loss.item())
            os.fsync(handler.stream.fileno())
            time.sleep(0.003)
    elif opt.add == "git":
        subprocess.run([sys.executable, "-S", "-c", "print(1)"], capture_output=True)
    elif opt.add == "publish":
        publish(uploader, loss.item())
    elif opt.add == "save":
        torch.save({"model": model.state_dict(), "texts": texts * 4}, os.path.join(folder, "last.pt"))
    elif opt.add == "evaluate" and step % 6 == 5:
        model.eval()
        with torch.no_grad():
            right = sum((model(batch(i)[0]).argmax(1) == batch(i)[1]).sum() for i in range(12))
        model.train()
    elif opt.add == "rare" and step % 8 == 7:
        time.sleep(0.1)
print(f"{1000 * (time.perf_counter() - start) / (opt.steps - 5):.2f} ms a step")
