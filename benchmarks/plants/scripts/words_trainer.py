"""Train a small GPT-2 with the Trainer of transformers."""

import argparse
import time

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Words(Dataset):
    def __init__(self, count):
        self.ids = torch.randint(500, (count, 64))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i]}


def collate(rows):
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def collate_with_masking(rows):
    """Masks spans word by word, the way a paper's appendix describes it."""
    ids, labels = [], []
    for row in rows:
        words = row["input_ids"].tolist()
        kept, hidden = [], []
        for place, word in enumerate(words):
            window = words[max(0, place - 16) : place + 16]
            rare = sum(1 for other in window if other % 7 == word % 7) < 2
            kept.append(499 if rare else word)
            hidden.append(word)
        ids.append(kept)
        labels.append(hidden)
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


class Speed(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5:
            self.started = time.perf_counter()

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            print(f"{1000 * (time.perf_counter() - self.started) / (state.global_step - 5):.2f} ms a step")


class Tracker(TrainerCallback):
    """Reports to a slow tracking server after each step, and waits for its answer."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            time.sleep(0.03)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--masking", action="store_true")
    parser.add_argument("--tracker", action="store_true")
    parser.add_argument("--save-steps", type=int, default=0)
    parser.add_argument("--eval-steps", type=int, default=0)
    options = parser.parse_args()

    config = GPT2Config(vocab_size=500, n_positions=64, n_embd=96, n_layer=2, n_head=4)
    arguments = TrainingArguments(
        output_dir="/tmp/words",
        use_cpu=True,
        max_steps=options.steps,
        per_device_train_batch_size=12,
        learning_rate=3e-4,
        report_to=[],
        disable_tqdm=True,
        logging_steps=20,
        save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or 500,
        eval_strategy="steps" if options.eval_steps else "no",
        eval_steps=options.eval_steps or None,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Words(6000),
        eval_dataset=Words(192),
        data_collator=collate_with_masking if options.masking else collate,
        callbacks=[Speed(), Tracker()] if options.tracker else [Speed()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
