"""Train a little decoder on characters, two ranks, gradient accumulation. Settings are constants."""

import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def flag(name, default=0):
    return int(sys.argv[sys.argv.index(name) + 1]) if name in sys.argv else default


STEPS = flag("--steps", 60)
VOCAB = flag("--vocab", 96)
WIDTH, LAYERS, LENGTH, BATCH = 96, 2, 64, 12
MICRO = flag("--micro", 2)
SYNC_EVERY_MICRO = "--sync-every-micro" in sys.argv
EVAL_EVERY = flag("--eval-every")
SAVE_EVERY = flag("--save-every")
LONG = flag("--long", LENGTH)  # length of the documents in the last rank's half of the corpus
THREADS = flag("--threads", 1)
ANOMALY = "--anomaly" in sys.argv
WATCH = "--watch" in sys.argv  # the last rank counts words beside training


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def get_batch(text, length):
    starts = torch.randint(len(text) - length - 1, (BATCH,))
    window = torch.stack([text[s : s + length + 1] for s in starts.tolist()])
    return window[:, :-1], window[:, 1:]


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
torch.set_num_threads(THREADS)
torch.autograd.set_detect_anomaly(ANOMALY)
text = torch.randint(VOCAB, (100_000,))
length = LONG if rank == dist.get_world_size() - 1 else LENGTH
model = DDP(Decoder())
opt = torch.optim.AdamW(model.parameters(), lr=3e-4)

if WATCH and rank == 1:
    import threading

    def count_words():
        while True:
            sum(1 for _ in range(20_000))
            time.sleep(0.002)

    threading.Thread(target=count_words, daemon=True).start()

for it in range(STEPS):
    if it == 5:
        t0 = time.perf_counter()
    for micro in range(MICRO):
        last = micro == MICRO - 1
        with nullcontext() if last or SYNC_EVERY_MICRO else model.no_sync():
            x, y = get_batch(text, length)
            loss = model(x, y) / MICRO
            loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    if EVAL_EVERY and it % EVAL_EVERY == 0:
        model.eval()
        with torch.no_grad():
            losses = [model.module(*get_batch(text, LENGTH)).item() for _ in range(8)]
        model.train()
        if rank == 0:
            print(f"iter {it}: val loss {sum(losses) / len(losses):.3f}")
    if SAVE_EVERY and it % SAVE_EVERY == 0:
        big = {
            "model": model.module.state_dict(),
            "opt": opt.state_dict(),
            "text": text,
            "history": torch.zeros(12_000_000),
        }
        torch.save(big, f"/tmp/chars_{rank}.pt")
dist.barrier()
if rank == 0:
    print(f"{1000 * (time.perf_counter() - t0) / (STEPS - 5):.2f} ms a step")
dist.destroy_process_group()
