"""A script as users write it: plain torch, its own checkpoint, its own resume; aorta is nowhere in it.

FAULTS (JSON) is a list of {attempt, rank, step, kind}: what strikes which rank at which step of which start.
"""

import ctypes
import json
import mmap
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
FAULTS = [fault for fault in json.loads(os.environ.get("FAULTS", "[]")) if fault["attempt"] == ATTEMPT]


def strike(step: int) -> None:
    for fault in FAULTS:
        if (fault["rank"], fault["step"]) == (RANK, step):
            KINDS[fault["kind"]]()


def raise_error() -> None:
    raise ValueError("planted by hand")


def terminate() -> None:
    ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()


def touch_lost_memory() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 16)
        lost = mmap.mmap(file.fileno(), 1 << 16)
        file.truncate(0)
        print(lost[0])


def abort_at_exit() -> None:
    ctypes.CDLL(None)["__cxa_atexit"](ctypes.CDLL(None).abort, None, None)


KINDS = {
    "exception": raise_error,
    "exit-3": lambda: sys.exit(3),
    "_exit-7": lambda: os._exit(7),
    "_exit-0": lambda: os._exit(0),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "segv": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "terminate": terminate,
    "bus": touch_lost_memory,
    "sleeps": lambda: time.sleep(1000),
    "out-of-memory": lambda: bytearray(1 << 60),
    "early": raise_error,
    "late-exception": raise_error,
    "late-abort": abort_at_exit,
}


def main(checkpoint: Path, num_steps: int, backend: str) -> None:
    strike(-1)  # before torch is there

    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    timeout = timedelta(seconds=float(os.environ.get("TIMEOUT_S", "600")))
    dist.init_process_group(backend, timeout=timeout)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first, num_steps):
        if RANK == 0:
            print(f"step {step}", flush=True)
        data = torch.randn(16, 32, device=device, generator=torch.Generator(device).manual_seed(step))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        strike(step)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        time.sleep(float(os.environ.get("STEP_S", "0.02")))
        if (step + 1) % 5 == 0:
            dist.barrier()
            if RANK == 0:
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1},
                    checkpoint.with_suffix(".new"),
                )
                checkpoint.with_suffix(".new").rename(checkpoint)
            dist.barrier()
    dist.destroy_process_group()
    strike(num_steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
