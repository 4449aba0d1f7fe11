"""Train a network on digits in one process."""

import argparse
import io
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    """Drawn digits. Kept packed they are unpacked and jittered whenever one is asked for."""

    def __init__(self, size, packed):
        images = torch.randn(size, 1, 28, 28)
        self.labels = torch.randint(10, (size,))
        self.packed = packed
        self.images = [self.pack(image) for image in images] if packed else images

    @staticmethod
    def pack(image):
        file = io.BytesIO()
        np.savez_compressed(file, image=image.numpy())
        return file.getvalue()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        if self.packed:
            image = torch.from_numpy(np.load(io.BytesIO(self.images[i]))["image"])
            return torch.roll(image, int(torch.randint(3, ())), -1), self.labels[i]
        return self.images[i], self.labels[i]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--size", type=int, default=1280)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--persistent-workers", action="store_true")
    parser.add_argument("--nap-ms", type=float, default=0)
    parser.add_argument("--save-each-step", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 2400), nn.ReLU(), nn.Linear(2400, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dataset = Digits(args.size, args.packed)
    loader = DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=args.persistent_workers,
    )
    step = 0
    for epoch in range(args.epochs):
        for images, labels in loader:
            if step == 5:
                start = time.perf_counter()
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            if args.nap_ms:  # "gives the GPU time to catch up", copied from somewhere
                time.sleep(args.nap_ms / 1000)
            optimizer.step()
            if args.save_each_step:
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "/tmp/digits.pt"
                )
            step += 1
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    print(f"{(time.perf_counter() - start) / (step - 5) * 1000:.2f} ms a step")


if __name__ == "__main__":
    main()
