"""Train a small convolutional network with accelerate, two processes."""

import argparse
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

WARMUP = 5


class Photos(Dataset):
    def __init__(self, augment):
        self.photos = torch.rand(512, 3, 40, 40)
        self.augment = augment

    def __len__(self):
        return 100_000

    def __getitem__(self, i):
        photo, label = self.photos[i % 512], i % 10
        if self.augment:
            photo = photo.flip(-1) if torch.rand(()) < 0.5 else photo
            top, left = torch.randint(8, (2,)).tolist()
            photo = nn.functional.pad(photo, (4, 4, 4, 4), mode="reflect")[
                :, top : top + 40, left : left + 40
            ]
            for _ in range(2):
                photo = nn.functional.avg_pool2d(photo[None], 3, 1, 1)[0]
        return photo, label


def network():
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
        nn.Conv2d(48, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--gather", choices=["features", "loss"], default=None)
    parser.add_argument(
        "--sample", action="store_true", help="the main process draws samples while the others wait"
    )
    parser.add_argument("--save-every", type=int, default=0)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history = nn.Linear(3000, 1000, bias=False)  # what the trackers hold, saved with the model
    accelerator.register_for_checkpointing(history)
    loader = DataLoader(Photos(args.augment), batch_size=32, shuffle=True, num_workers=0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, (photos, labels) in enumerate(loader):
        if step == args.steps:
            break
        if step == WARMUP:
            started = time.perf_counter()
        logits = model(photos)
        loss = nn.functional.cross_entropy(logits, labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if args.gather == "features":
            everything = accelerator.gather(photos.repeat(1, 8, 1, 1))
            spread = everything[:, :3].std()
        elif args.gather == "loss":
            spread = accelerator.gather(loss.detach()).std()
        if args.sample and accelerator.is_main_process:
            with torch.no_grad():
                noise = torch.rand(8, 3, 40, 40)
                for _ in range(4):
                    noise = noise + 0.01 * accelerator.unwrap_model(model)(noise).mean()
        accelerator.wait_for_everyone() if args.sample else None
        if args.save_every and step % args.save_every == 0:
            accelerator.save_state("/tmp/photos_state")
    accelerator.print(f"{1000 * (time.perf_counter() - started) / (args.steps - WARMUP):.2f} ms a step")
    if args.gather:
        accelerator.print(f"spread {spread:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
