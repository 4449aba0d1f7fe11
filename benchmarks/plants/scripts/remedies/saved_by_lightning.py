"""
cause: checkpoint
told: save less often than every_n_train_steps=\S+
library: lightning
"""

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from trainers_lightning import Classifier, TimedSteps, batches, folder

trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    default_root_dir=folder(),
    callbacks=[
        TimedSteps(),
        ModelCheckpoint(
            every_n_train_steps=2,
            # -> every_n_train_steps=1000,
        ),
    ],
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), batches(200), batches(16))
