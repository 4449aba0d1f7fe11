"""What programs of transformers' Trainer share: rows, a classifier, and the steps of its loop, timed."""

import tempfile

import torch
from measured import steps
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback

LENGTH, WORDS, CLASSES = 32, 2000, 4


class Rows(Dataset):
    """Of a Trainer."""

    def __init__(self, num):
        self.ids = torch.randint(WORDS, (num, LENGTH))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, place):
        return {"input_ids": self.ids[place], "labels": int(self.ids[place, 0]) % CLASSES}


class Timed(TrainerCallback):
    """Ends training behind the steps that are timed."""

    def __init__(self, num=120):
        self.steps = steps(num)

    def on_step_begin(self, args, state, control, **kwargs):
        if next(self.steps, None) is None:
            control.should_training_stop = True


def folder():
    return tempfile.mkdtemp()


def bert(layers=2):
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
    return BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, num_hidden_layers=layers, num_labels=CLASSES, **sizes)
    )


torch.set_num_threads(1)
