"""Loops of libraries: libraries.py KIND. Each needs its package; 12 optimizer steps."""

import os
import sys
from typing import Any

import torch

from client_loops.outcome import BATCH, STEPS, Data, Net, Outcome, loader

outcome = Outcome()


def trainer(accumulate: int = 1, evaluate: bool = False) -> None:
    import transformers

    class Note(transformers.TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if "loss" in logs:
                outcome.note(logs["loss"])

    arguments = transformers.TrainingArguments(
        output_dir=os.environ["CLIENT_OUT"] + "/hf",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        eval_strategy="steps" if evaluate else "no",
        eval_steps=5,
        disable_tqdm=True,
    )
    owner = transformers.Trainer(
        model=Net(), args=arguments, train_dataset=Data(), eval_dataset=Data(32), callbacks=[Note()]
    )
    owner.train()
    outcome.write(owner.model)


def trainer_accumulation() -> None:
    trainer(accumulate=2, evaluate=True)


def lightning(accumulate: int = 1, validate: bool = False) -> None:
    import lightning as library

    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.net(**batch)["loss"]
            outcome.note(loss.item())
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val", self.net(**batch)["loss"], sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    module = Module()
    library.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        val_check_interval=5 if validate else None,
        check_val_every_n_epoch=None if validate else 100,
    ).fit(module, loader(), loader(32))
    outcome.write(module)


def lightning_accumulation() -> None:
    lightning(accumulate=3, validate=True)


def fabric() -> None:
    from lightning.fabric import Fabric

    owner = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    owner.launch()
    model: Any = Net()
    model, optimizer = owner.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    for _, batch in zip(range(STEPS), owner.setup_dataloaders(loader()), strict=False):
        loss = model(**batch)["loss"]
        owner.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        outcome.note(loss.item())
    outcome.write(model)


def accelerate_accumulation() -> None:
    """Clipping in the last micro-batch, a scheduler, and a gather of the losses for the log."""
    from accelerate import Accelerator

    owner = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, batches, scheduler = owner.prepare(model, optimizer, loader(), scheduler)
    total = 0.0
    for _, batch in zip(range(2 * STEPS), batches, strict=False):
        with owner.accumulate(model):
            loss = model(**batch)["loss"]
            owner.backward(loss)
            if owner.sync_gradients:
                owner.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += owner.gather(loss.detach()).mean().item()
        if owner.sync_gradients:
            outcome.note(total)
            total = 0.0
    outcome.write(model)


def deepspeed(stage: int, accumulate: int = 1) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as library

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    library.init_distributed("gloo")
    model = Net()
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for number, batch in zip(range(STEPS * accumulate), loader(), strict=False):
        loss = engine(batch["x"].bfloat16(), batch["labels"].bfloat16())["loss"]
        engine.backward(loss)
        engine.step()
        if (number + 1) % accumulate == 0:
            outcome.note(loss.item())
    outcome.write(model)


def zero1() -> None:
    deepspeed(1)


def zero2_accumulation() -> None:
    deepspeed(2, accumulate=2)


def zero3() -> None:
    deepspeed(3)


def zero3_accumulation() -> None:
    deepspeed(3, accumulate=2)


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
