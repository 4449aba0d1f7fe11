"""
cause: synchronisation
told: logging_nan_inf_filter=False in place of logging_nan_inf_filter=True.* in TrainingArguments
device: cuda
library: transformers
"""

import tempfile

import torch
from measured import network, steps
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

FILTER = True
# -> FILTER = False


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = network(width=4096, layers=8)

    def forward(self, rows, labels):
        scores = self.layers(rows)
        return {"loss": cross_entropy(scores, labels), "scores": scores}


class Samples(Dataset):
    """Each item is a batch."""

    def __init__(self):
        self.rows, self.labels = torch.randn(20, 2048, 64), torch.randint(10, (20, 2048))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, chosen):
        return {"rows": self.rows[chosen], "labels": self.labels[chosen]}


class Speed(TrainerCallback):
    def __init__(self):
        self.steps = steps(300)

    def on_step_begin(self, args, state, control, **kwargs):
        if next(self.steps, None) is None:
            control.should_training_stop = True


arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=1,
    max_steps=10_000,
    learning_rate=0.01,
    optim="sgd",
    logging_steps=10_000,
    logging_nan_inf_filter=FILTER,
    accelerator_config={"non_blocking": True},  # or the copy of the next batch waits as long
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    remove_unused_columns=False,
)
Trainer(
    model=Classifier(),
    args=arguments,
    train_dataset=Samples(),
    data_collator=lambda items: items[0],
    callbacks=[Speed()],
).train()
