"""
cause: small_messages|transfer
told: 'leave sync_dist=True out of .* in steps that train.*: at .*logged_by_each.py:\d+'
ranks: 2
library: lightning
"""

import lightning
import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

CLASSES = [f"class_{number}" for number in range(10)]


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = network(width=128)

    def training_step(self, rows_and_labels):
        rows, labels = rows_and_labels
        scores = self.layers(rows)
        loss = cross_entropy(scores, labels)
        means = dict(zip(CLASSES, scores.detach().mean(0), strict=True))
        self.log_dict(means | {"loss": loss}, sync_dist=True)
        # -> self.log_dict(means | {"loss": loss})
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches():
    for _ in steps(200):
        yield batch(64)


torch.set_num_threads(1)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), batches())
