"""A model, its data, and what each rank of a client leaves: losses, a hash of the parameters, counts.

Counts come from the process groups themselves (their sequence numbers), never from aorta.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 12
BATCH = 4


class Net(nn.Module):
    """x (B, 16) and labels (B, 1) to {"loss": scalar, "logits": (B, 1)}."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        loss = logits.mean() if labels is None else (logits - labels).square().mean()
        return {"loss": loss, "logits": logits}


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, num_items: int = 512) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(num_items, 16, generator=generator)
        self.labels = torch.randn(num_items, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


def loader(num_items: int = 512) -> Any:
    return torch.utils.data.DataLoader(Data(num_items), BATCH)


def batches(num: int = STEPS) -> Iterator[dict[str, torch.Tensor]]:
    """Batches that differ by rank."""
    for _, batch in zip(range(num), loader(), strict=False):
        yield {name: value + 0.1 * dist.get_rank() for name, value in batch.items()}


def iteration(model: nn.Module, optimizer: Any, batch: Any) -> float:
    loss = model(**batch)["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


class Outcome:
    """Losses and counts that a rank saw of its own training."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.counts: list[int] = []
        """Collectives that the process groups had counted when each iteration was over."""

    def note(self, loss: float) -> None:
        """An iteration is over."""
        self.losses.append(loss)
        self.counts.append(sum(sequence_numbers().values()))

    def write(self, *modules: nn.Module) -> None:
        """RANK.json in CLIENT_OUT; call it before the process group is destroyed."""
        rank = int(os.environ.get("RANK", 0))
        document = {
            "losses": self.losses,
            "digest": [digest(module) for module in modules],
            "counts": self.counts,
            "groups": sequence_numbers(),
        }
        Path(os.environ["CLIENT_OUT"], f"{rank}.json").write_text(json.dumps(document))


def sequence_numbers() -> dict[str, int]:
    """Sequence number of each process group of this rank, as its backend counts."""
    if not dist.is_initialized():
        return {}
    return {
        group.group_name: group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        for group in dist.distributed_c10d._world.pg_map
    }


def digest(module: nn.Module) -> str:
    """Hash of all parameters, bit by bit."""
    value = hashlib.sha256()
    for parameter in module.parameters():
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        value.update(local.float().contiguous().numpy().tobytes())
    return value.hexdigest()[:16]
