"""
cause: between_steps
told: ^preprocess_logits_for_metrics=
device: cuda
library: transformers
"""

import torch
from torch.utils.data import Dataset
from trainers import Timed, folder
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LENGTH, WORDS = 256, 32_000


class Texts(Dataset):
    def __init__(self, num):
        self.ids = torch.randint(WORDS, (num, LENGTH))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, place):
        return {"input_ids": self.ids[place], "labels": self.ids[place]}


def accuracy(predicted):
    return {"accuracy": (predicted.predictions.argmax(-1) == predicted.label_ids).mean()}


def accuracy_of_words(predicted):
    return {"accuracy": (predicted.predictions == predicted.label_ids).mean()}


sizes = {"n_positions": LENGTH, "n_embd": 512, "n_layer": 4, "n_head": 8}
Trainer(
    model=GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes)),
    args=TrainingArguments(
        output_dir=folder(),
        max_steps=10_000,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=16,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=20,
        bf16=True,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Texts(2048),
    eval_dataset=Texts(32),
    compute_metrics=accuracy,
    # -> compute_metrics=accuracy_of_words, preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
    callbacks=[Timed()],
).train()
