"""A recurrent language model with carried states and clipped gradients, as tutorials train one."""

import argparse
import math
import random

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--length", type=int, default=30)
given = parser.parse_args()
random.seed(1)
torch.manual_seed(1)
WORDS = [f"w{number}" for number in range(3000)]
TEXT = [random.choice(WORDS) for _ in range(36_000)]
NUMBER = {word: number for number, word in enumerate(WORDS)}


def batchify(words, columns):
    numbers = torch.tensor([NUMBER[word] for word in words])
    rows = len(numbers) // columns
    return numbers[: rows * columns].view(columns, rows).t().contiguous()


class RNNModel(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, 2, dropout=0.2)
        self.decoder = nn.Linear(width, words)

    def forward(self, data, hidden):
        output, hidden = self.rnn(self.encoder(data), hidden)
        return self.decoder(output).flatten(0, 1), hidden


def get_batch(source, start):
    length = min(given.length, len(source) - 1 - start)
    return source[start : start + length], source[start + 1 : start + 1 + length].reshape(-1)


def evaluate(source):
    model.eval()
    total = 0.0
    hidden = None
    with torch.no_grad():
        for start in range(0, len(source) - 1, given.length):
            data, targets = get_batch(source, start)
            output, hidden = model(data, hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


train_data, valid_data = batchify(TEXT[:30_000], 20), batchify(TEXT[30_000:], 10)
model = RNNModel(len(WORDS), 128)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
for epoch in range(given.epochs):
    model.train()
    hidden = None
    for start in range(0, len(train_data) - 1, given.length):
        data, targets = get_batch(train_data, start)
        optimizer.zero_grad()
        output, hidden = model(data, hidden)
        hidden = tuple(one.detach() for one in hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    print(f"epoch {epoch}: perplexity {math.exp(evaluate(valid_data)):.1f}")
