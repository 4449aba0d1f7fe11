"""
cause: compute
told: leave precision=\S+ out of Trainer.*fp32, as it is
library: lightning
"""

import lightning
from trainers_lightning import Classifier, TimedSteps, batches, folder

trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    default_root_dir=folder(),
    callbacks=[TimedSteps()],
    enable_checkpointing=False,
    precision="64-true",
    # ->
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), batches(200), batches(16))
