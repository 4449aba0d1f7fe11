"""GPT-2 on 2 ranks as its users train it, without a word of aorta: torchrun gpt2.py HOW STEPS [--small].

HOW: accelerate, trainer (both need accelerate and transformers) or ddp, plain DDP.
"""

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

HOW, STEPS = sys.argv[1], int(sys.argv[2])
SMALL = "--small" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, BATCH, VOCABULARY = (16, 2, 256) if SMALL else (256, 8, 50257)
SIZE = {"n_layer": 2, "n_embd": 32, "n_head": 2} if SMALL else {"n_layer": 12}


class Tokens(Dataset[Any]):
    def __len__(self) -> int:
        return BATCH * 2 * (STEPS + 4)

    def __getitem__(self, place: int) -> dict[str, Any]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": tokens, "labels": tokens}


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, attn_implementation="eager", **SIZE)
    return GPT2LMHeadModel(config)


def accelerate() -> None:
    from accelerate import Accelerator
    from transformers import get_cosine_schedule_with_warmup

    accelerator = Accelerator(mixed_precision="bf16" if DEVICE == "cuda" else "no", cpu=DEVICE == "cpu")
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = get_cosine_schedule_with_warmup(optimizer, 10, STEPS)
    loader = DataLoader(Tokens(), batch_size=BATCH, shuffle=True, num_workers=1 if SMALL else 2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    for step, batch in enumerate(loader):
        if step == STEPS:
            break
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            accelerator.print(step, loss.item())
    accelerator.end_training()


def trainer() -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=os.environ.get("TRAINER_FOLDER", "/tmp/gpt2_trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        bf16=DEVICE == "cuda",
        use_cpu=DEVICE == "cpu",
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        dataloader_num_workers=1 if SMALL else 2,
        disable_tqdm=True,
    )
    Trainer(model=gpt2(), args=arguments, train_dataset=Tokens()).train()


def ddp() -> None:
    torch.distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    rank = torch.distributed.get_rank()
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if DEVICE == "cuda" else torch.device("cpu")
    torch.manual_seed(1)
    width = 32 if SMALL else 768
    layer = nn.TransformerEncoderLayer(width, width // 16, 4 * width, 0.0, batch_first=True)
    bare = nn.Sequential(
        nn.Embedding(VOCABULARY, width),
        nn.TransformerEncoder(layer, 2 if SMALL else 12, enable_nested_tensor=False),
        nn.Linear(width, VOCABULARY),
    ).to(device)
    model = nn.parallel.DistributedDataParallel(bare, device_ids=[rank] if DEVICE == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = DataLoader(Tokens(), batch_size=BATCH, num_workers=1 if SMALL else 2)
    for step, batch in enumerate(loader):
        if step == STEPS:
            break
        tokens = batch["input_ids"].to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and rank == 0:
            print(step, loss.item())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    {"accelerate": accelerate, "trainer": trainer, "ddp": ddp}[HOW]()
