"""Loops of somebody else's, which the rank processes of test_attached.py run."""

import io
import json
import pickle
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import aorta
from aorta.attach import hooks
from aorta.attach.settings import AttachSettings
from aorta.hang.report import read_reports


def _step() -> None:
    tensor = torch.ones(64)
    dist.all_reduce(tensor)


def traced_loop(folder: str) -> dict[str, Any]:
    """Steps 100 to 111 with a window of the profiler, scalars, and a watchdog that has nothing to say."""
    with aorta.instrument(
        folder,
        config={"profiling": "mine"},  # a script's own, of its own form
        profiling={"enabled": True, "wait": 2, "warmup": 1, "active": 2},
        tensorboard=True,
        hang={"timeout_s": 60},
    ) as recorder:
        for number in range(100, 112):
            with recorder.step(global_step=number) as step:
                _step()
                step.log(loss=1.0)
    dist.barrier()
    run = json.loads((Path(folder) / "run.json").read_text())
    return {
        "lines": len((Path(folder) / f"rank_{dist.get_rank()}_metrics.jsonl").read_text().splitlines()),
        "traces": len(list((Path(folder) / "torch_profiler" / f"rank{dist.get_rank()}").iterdir())),
        "profiled": run["coverage"].get("profiled_steps"),
        "why none": run["not_measured"].get("coverage.kernel_windows"),
        "scalars": len(list((Path(folder) / "tensorboard").iterdir())),
        "hang": (Path(folder) / "hang").exists(),
    }


def hanging_loop(folder: str) -> list[int]:
    """Rank 1 comes seconds late to a collective of step 3; the ranks that reported."""
    with aorta.instrument(folder, hang={"timeout_s": 1.0}) as recorder:
        for number in range(5):
            with recorder.step():
                if number == 3 and dist.get_rank() == 1:
                    time.sleep(8)
                _step()
    dist.barrier()
    return sorted(report.rank for report in read_reports(Path(folder)))


def raising_loop(folder: str) -> str:
    """Return the script's own error, with everything on."""
    try:
        with aorta.instrument(
            folder,
            profiling={"enabled": True, "wait": 0, "warmup": 0, "active": 5},
            hang={},
            tensorboard=True,
        ) as recorder:
            for number in range(5):
                with recorder.step():
                    _step()
                    if number == 2:
                        raise ZeroDivisionError("mine")
    except ZeroDivisionError as error:
        return str(error)
    return "none"


def _saved(state: Any, path: str, saving: str) -> None:
    match saving:
        case "torch":
            torch.save(state, path + ".new")
            Path(path + ".new").rename(path)
        case "bytes":
            with open(path, "wb") as file:
                torch.save(state, file)
        case "pickle":
            Path(path).write_bytes(pickle.dumps(state))


def _loaded(path: str, saving: str) -> Any:
    if saving == "pickle":
        return pickle.loads(Path(path).read_bytes())
    return torch.load(io.BytesIO(Path(path).read_bytes()) if saving == "bytes" else path)


def resuming_loop(
    folder: str, checkpoint: str, num_steps: int, optimizer_kind: str, saving: str, every: int
) -> list[float]:
    """A script that saves itself every second step and resumes itself, under the hooks of `aorta run`."""
    attachment = hooks.Attachment(AttachSettings(output=folder))
    attachment.imported("torch", torch)
    model = torch.nn.Linear(4, 1)
    optimizer = getattr(torch.optim, optimizer_kind)(model.parameters(), lr=0.01)
    first = 0
    if saving and Path(checkpoint).exists():
        state = _loaded(checkpoint, saving)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    losses = []
    for step in range(first, first + num_steps):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        losses.append(float(loss))
        if (step + 1) % every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            _saved(state, checkpoint, saving)
    dist.destroy_process_group()
    return losses
