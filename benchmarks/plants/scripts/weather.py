"""Forecast the next day of weather stations, with a small trainer class of one's own; one process."""

import argparse
import gc
import json
import math
import pathlib
import random
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

HOURS, AHEAD, FEATURES, BATCH = 72, 24, 12, 24


def series(number):
    draw = random.Random(number)
    phase, level = draw.random(), draw.random()
    return [
        [math.sin(phase + hour / 24 * (f + 1)) + level for f in range(FEATURES)]
        for hour in range(HOURS + AHEAD)
    ]


class Stations(Dataset):
    def __init__(self, size, as_lists):
        rows = [series(i) for i in range(size)]
        self.rows = rows if as_lists else [torch.tensor(row) for row in rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i][:HOURS], self.rows[i][HOURS:]


def pad(samples):
    """Pads and clamps in Python, as it was written for stations with gaps."""
    x, y = [], []
    for before, after in samples:
        x.append([[max(-3.0, min(3.0, value)) for value in hour] for hour in before])
        y.append([[max(-3.0, min(3.0, value)) for value in hour] for hour in after])
    return torch.tensor(x), torch.tensor(y)


class Archive:
    """Text files of readings, one a batch; parsed as they are read."""

    def __init__(self, folder, size):
        self.paths = []
        for i in range(size):
            path = pathlib.Path(folder) / f"{i}.csv"
            rows = [hour for j in range(BATCH) for hour in series(i * BATCH + j)]
            path.write_text("\n".join(",".join(f"{value:.4f}" for value in hour) for hour in rows))
            self.paths.append(path)
        self.kept = {}

    def parse(self, path):
        rows = [[float(value) for value in line.split(",")] for line in path.read_text().splitlines()]
        both = torch.tensor(rows).view(BATCH, HOURS + AHEAD, FEATURES)
        return both[:, :HOURS], both[:, HOURS:]

    def batches(self, steps, keep):
        for i in range(steps):
            path = self.paths[i % len(self.paths)]
            if keep:
                if path not in self.kept:
                    self.kept[path] = self.parse(path)
                yield self.kept[path]
            else:
                yield self.parse(path)


class Forecaster(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.inward = nn.Conv1d(FEATURES, width, 5, padding=2)
        self.blocks = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(3))
        self.out = nn.Linear(HOURS, AHEAD)
        self.head = nn.Conv1d(width, FEATURES, 1)

    def forward(self, x):
        x = self.inward(x.transpose(1, 2))
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(self.out(x)).transpose(1, 2)


class HandAdam(torch.optim.Optimizer):
    """Adam with a schedule for each weight, from a notebook."""

    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("m", torch.zeros_like(p))
                state.setdefault("v", torch.zeros_like(p))
                rows = p.view(p.shape[0], -1)
                m, v = state["m"].view_as(rows), state["v"].view_as(rows)
                g = p.grad.view_as(rows)
                for i in range(len(rows)):
                    m[i].mul_(0.9).add_(g[i], alpha=0.1)
                    v[i].mul_(0.99).addcmul_(g[i], g[i], value=0.01)
                    rows[i].sub_(m[i] / (v[i].sqrt() + 1e-8), alpha=group["lr"])


class Fit:
    def __init__(self, options):
        self.options = options
        self.model = Forecaster()
        self.optimizer = (
            HandAdam(self.model.parameters())
            if options.hand_adam
            else torch.optim.Adam(self.model.parameters(), lr=1e-3)
        )
        self.folder = tempfile.mkdtemp()
        self.history = []
        self.held_out = None
        self.start = None

    def clip(self, limit=1.0):
        for _ in range(6):  # norm by norm, until nothing is above
            for p in self.model.parameters():
                for row in p.grad.view(p.shape[0], -1):
                    norm = row.norm().item()
                    if norm > limit:
                        row.mul_(limit / norm)

    def ranking(self, guess, y):
        """How well stations are ordered: pairs in order over all pairs."""
        guessed, true = guess.mean((1, 2)).tolist(), y.mean((1, 2)).tolist()
        right = 0
        for _ in range(10):
            right = sum(
                (guessed[i] < guessed[j]) == (true[i] < true[j])
                for i in range(len(true))
                for j in range(len(true))
            )
        return right / len(true) ** 2

    def wait_for_turn(self):
        """A shared machine: others leave a file while they run."""
        for _ in range(3):
            if not (pathlib.Path(self.folder) / "busy").exists():
                time.sleep(0.004)

    def validate(self):
        self.model.eval()
        with torch.no_grad():
            loss = sum(nn.functional.mse_loss(self.model(x), y).item() for x, y in self.held_out)
        self.model.train()
        return loss

    def train_step(self, x, y):
        guess = self.model(x)
        loss = nn.functional.mse_loss(guess, y)
        self.optimizer.zero_grad()
        loss.backward()
        if self.options.clip:
            self.clip()
        self.optimizer.step()
        return guess.detach(), loss.item()

    def run(self, source):
        for i, (x, y) in enumerate(source):
            if i == 5:
                self.start = time.perf_counter()
            guess, loss = self.train_step(x, y)
            entry = {"step": i, "loss": loss}
            if self.options.ranking:
                entry["ranking"] = self.ranking(guess, y)
            if self.options.poll:
                self.wait_for_turn()
            if self.options.collect and i % 8 == 7:
                gc.collect()
            if self.options.validate_every and i % self.options.validate_every == 4:
                entry["held out"] = self.validate()
            self.history.append(json.dumps(entry))
        return 1000 * (time.perf_counter() - self.start) / (len(self.history) - 5)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--source", default="archive", choices=["archive", "kept", "loader", "lists"])
    parser.add_argument("--validate-every", type=int, default=0)
    for flag in ("hand-adam", "clip", "ranking", "poll", "collect"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    fit = Fit(options)
    if options.source in ("archive", "kept"):
        archive = Archive(fit.folder, 6)
        fit.held_out = [archive.parse(path) for path in archive.paths]
        for path in archive.paths if options.source == "kept" else ():
            archive.kept[path] = archive.parse(path)
        source = archive.batches(options.steps, options.source == "kept")
    else:
        data = Stations(BATCH * options.steps, options.source == "lists")
        source = DataLoader(
            data, batch_size=BATCH, shuffle=True, collate_fn=pad if options.source == "lists" else None
        )
    print(f"{fit.run(source):.2f} ms a step")


if __name__ == "__main__":
    main()
