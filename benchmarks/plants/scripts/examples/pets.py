"""Images classified: a data set that decodes and resizes, a one-cycle rate, accuracy after each epoch."""

import io

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class PetsDataset(Dataset):
    """Photographs as bytes, decoded when they are asked for."""

    def __init__(self, number):
        noise = np.random.default_rng(0)
        self.files = []
        for _ in range(number):
            buffer = io.BytesIO()
            np.savez_compressed(buffer, image=noise.integers(0, 255, (96, 96, 3), dtype=np.uint8))
            self.files.append((buffer.getvalue(), int(noise.integers(0, 10))))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        data, label = self.files[index]
        with np.load(io.BytesIO(data)) as archive:
            image = archive["image"]
        image = torch.from_numpy(image).permute(2, 0, 1).float() / 255
        resized = nn.functional.interpolate(image[None], (64, 64), mode="bilinear")[0]
        return {"image": resized, "label": label}


def main():
    train = DataLoader(PetsDataset(512), shuffle=True, batch_size=16, num_workers=0)
    held_out = DataLoader(PetsDataset(64), batch_size=32)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2),
        nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, epochs=2, steps_per_epoch=len(train))
    for epoch in range(2):
        model.train()
        for batch in train:
            outputs = model(batch["image"])
            loss = nn.functional.cross_entropy(outputs, batch["label"])
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        right = total = 0
        for batch in held_out:
            with torch.no_grad():
                guesses = model(batch["image"]).argmax(-1)
            right, total = right + int((guesses == batch["label"]).sum()), total + len(guesses)
        print(f"epoch {epoch}: {100 * right / total:.1f} %")


if __name__ == "__main__":
    main()
