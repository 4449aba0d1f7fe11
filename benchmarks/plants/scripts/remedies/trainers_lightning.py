"""What programs of Lightning's Trainer share: batches, a classifier, and the steps of its loop, timed."""

import tempfile

import lightning
import torch
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = network(width=256, layers=4)

    def training_step(self, batch, place):
        return self.loss(batch)

    def validation_step(self, batch, place):
        self.log("loss", self.loss(batch))

    def loss(self, batch):
        rows, labels = batch
        return cross_entropy(self.layers(rows.to(self.layers[0].weight.dtype)), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class TimedSteps(lightning.Callback):
    """Of Lightning's Trainer."""

    def __init__(self, num=120):
        self.steps = steps(num)

    def on_train_batch_start(self, trainer, module, batch, place):
        trainer.should_stop = next(self.steps, None) is None


def batches(num, rows=128):
    whole = [(torch.randn(rows, 64), torch.randint(10, (rows,))) for _ in range(num)]
    return DataLoader(whole, batch_size=None)


def folder():
    return tempfile.mkdtemp()


torch.set_num_threads(1)
