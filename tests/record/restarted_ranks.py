"""A rank of a job that is started again. Module-level: ranks import it by name."""

import torch
import torch.distributed as dist

import aorta


def some_steps(output_dir: str, first: int, last: int, raises: bool) -> None:
    values = torch.ones(4)
    with aorta.instrument(output_dir) as recorder:
        for step in range(first, last + 1):
            with recorder.step(global_step=step):
                dist.all_reduce(values)
        if raises:
            dist.barrier()
            raise RuntimeError("planted")
