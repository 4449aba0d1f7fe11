"""Train a classifier of sensor windows with Lightning, two processes."""

import argparse
import time

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Sensors(L.LightningModule):
    def __init__(self, per_class_metrics, synced):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(8, 32, 7, padding=3), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(32, 64, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4),
            nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 12),
        )  # fmt: skip
        self.per_class_metrics, self.synced = per_class_metrics, synced

    def training_step(self, batch, _):
        x, y = batch
        logits = self.net(x)
        if self.per_class_metrics:
            for c in range(12):
                for name, value in (("recall", logits[y == c].mean()), ("score", logits[:, c].mean())):
                    self.log(f"train/{name}/{c}", value.nan_to_num(), sync_dist=self.synced)
        return nn.functional.cross_entropy(logits, y)

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val/loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Speed(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        if index == 5:
            self.started = time.perf_counter()

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            ms = 1000 * (time.perf_counter() - self.started) / (trainer.global_step - 5)
            print(f"{ms:.2f} ms a step")


class Spectra(L.Callback):
    """Writes spectra of the batch, in the first process alone."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.is_global_zero:
            spectra = np.abs(np.fft.rfft(batch[0].numpy(), n=1024, axis=-1))
            np.save("/tmp/sensors_spectra.npy", np.sort(spectra[:48], axis=-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--validate-every", type=int, default=0)
    parser.add_argument("--spectra", action="store_true")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--metrics", choices=["synced", "local"])
    args = parser.parse_args()

    L.seed_everything(0)
    x, y = torch.randn(6400, 8, 256), torch.randint(12, (6400,))
    train = DataLoader(TensorDataset(x, y), batch_size=48)
    val = DataLoader(TensorDataset(x[:768], y[:768]), batch_size=96)
    callbacks = [Speed()]
    if args.spectra:
        callbacks.append(Spectra())
    if args.save_every:
        callbacks.append(
            ModelCheckpoint(
                "/tmp/sensors", every_n_train_steps=args.save_every, save_top_k=-1, save_on_exception=False
            )
        )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=args.steps,
        val_check_interval=args.validate_every or None,
        limit_val_batches=4 if args.validate_every else 0,
        num_sanity_val_steps=0,
        enable_checkpointing=bool(args.save_every),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=callbacks,
    )
    trainer.fit(Sensors(args.metrics is not None, args.metrics == "synced"), train, val)


if __name__ == "__main__":
    main()
