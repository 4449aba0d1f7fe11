"""
cause: program_code|between_steps
told: log few values
library: lightning
"""

import lightning
import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)


class Logged(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network(width=64, layers=2)

    def training_step(self, rows_and_labels, number):
        outputs = self.net(rows_and_labels[0])
        for label in range(10):
            # ->
            self.log(f"mean/{label}", outputs[:, label].mean().detach(), on_step=True, on_epoch=True)
            # ->
        return cross_entropy(outputs, rows_and_labels[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


batches = [batch(64) for _ in range(200)]
loader = (one for _, one in zip(steps(200), batches, strict=True))
trainer = lightning.Trainer(
    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Logged(), loader)
