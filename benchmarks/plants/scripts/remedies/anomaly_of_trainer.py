"""
cause: program_code
told: 'leave detect_anomaly=True out of Trainer\(\.\.\.\): at .*anomaly_of_trainer.py:\d+'
library: lightning
"""

import lightning
import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = network(width=128, layers=20)

    def training_step(self, rows_and_labels):
        rows, labels = rows_and_labels
        return cross_entropy(self.layers(rows), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches():
    for _ in steps(200):
        yield batch(64)


torch.set_num_threads(1)
torch.autograd.set_detect_anomaly(False)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=1,
    detect_anomaly=True,
    # ->
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), batches())
