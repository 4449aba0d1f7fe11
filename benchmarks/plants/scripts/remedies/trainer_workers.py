"""
cause: data_loading
told: dataloader_persistent_workers=True in place of dataloader_persistent_workers=
library: transformers
"""

from trainers import Rows, Timed, bert, folder
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir=folder(),
    max_steps=10_000,
    per_device_train_batch_size=16,
    save_strategy="no",
    dataloader_num_workers=2,
    dataloader_persistent_workers=False,
    # -> dataloader_persistent_workers=True,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
Trainer(
    model=bert(), args=arguments, train_dataset=Rows(160), eval_dataset=Rows(64), callbacks=[Timed()]
).train()
