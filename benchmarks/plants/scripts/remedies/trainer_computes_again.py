"""
cause: compute
told: leave gradient_checkpointing=True out of TrainingArguments
library: transformers
"""

from trainers import Rows, Timed, bert, folder
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir=folder(),
    max_steps=10_000,
    per_device_train_batch_size=16,
    save_strategy="no",
    gradient_checkpointing=True,
    # ->
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
Trainer(
    model=bert(), args=arguments, train_dataset=Rows(640), eval_dataset=Rows(64), callbacks=[Timed()]
).train()
