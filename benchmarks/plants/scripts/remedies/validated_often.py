"""
cause: between_steps
told: validate less often than val_check_interval=\S+
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
    val_check_interval=5,
    # -> val_check_interval=200,
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), batches(200), batches(16))
