"""
cause: pause
told: keep keys and values from call to call
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

torch.set_num_threads(1)


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.inner = nn.Embedding(64, 256), nn.Linear(256, 768)
        self.hidden = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        self.scores = nn.Linear(256, 64)

    def forward(self, words, kept=None):
        x = self.words(words)
        queries, keys, values = self.inner(x).chunk(3, -1)
        if kept:
            keys, values = torch.cat((kept[0], keys), 1), torch.cat((kept[1], values), 1)
        if kept is not None:
            kept[:] = keys, values
        x = x + scaled_dot_product_attention(queries, keys, values, is_causal=not kept or len(words[0]) > 1)
        return self.scores(x + self.hidden(x))


model = Writer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def written(words, kept, num=12):
    for _ in range(num):
        scores = model(words)
        # -> scores = model(words[:, -1:] if kept else words, kept)
        words = torch.cat((words, torch.multinomial(scores[:, -1].softmax(-1), 1)), 1)
    return words


for _ in steps():
    model.eval()
    with torch.no_grad():
        texts = written(torch.randint(64, (8, 48)), [])
    model.train()
    optimizer.zero_grad()
    cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten()).backward()
    optimizer.step()
