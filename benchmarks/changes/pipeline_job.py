"""A model in pipeline stages (1F1B), one per rank, with the interface of cases.Job."""

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class PipelineJob:
    """One training step at a time of a stack of blocks that is cut between the ranks."""

    def __init__(self, settings: dict[str, Any], device: torch.device) -> None:
        rank, num_stages = dist.get_rank(), dist.get_world_size()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        hidden, batch = settings["hidden"], settings["batch_size"]
        torch.manual_seed(rank)
        blocks = nn.Sequential(*(Block(hidden) for _ in range(settings["num_layers"] // num_stages)))
        blocks.to(device, dtype)
        self.optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-4)
        stage = PipelineStage(blocks, rank, num_stages, device)
        self.schedule = Schedule1F1B(stage, settings["micro_batches"], loss_fn=nn.functional.mse_loss)
        self.input = torch.randn(batch, settings["seq_len"], hidden, device=device, dtype=dtype)
        self.is_first, self.is_last = rank == 0, rank == num_stages - 1
        self.next_step = 0
        self.losses: list[Tensor] = []
        self.run = self

    def step(self) -> int:
        """One training step; its number."""
        number = self.next_step
        self.next_step += 1
        losses: list[Tensor] = []
        if self.is_first:
            self.schedule.step(self.input)
        else:
            self.schedule.step(target=self.input, losses=losses if self.is_last else None)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if losses:
            self.losses.append(losses[-1])
        return number

    def close(self) -> None:
        """Frees the device's memory for the next job."""
        del self.run, self.schedule, self.optimizer, self.input
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
