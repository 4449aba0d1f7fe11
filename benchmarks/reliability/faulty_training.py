"""train.py with faults planted into its steps, for the trials beside this file.

    FAULTS='[{"attempt": 0, "rank": 1, "step": 7, "kind": "sigkill"}]' torchrun ... planted.py --override ...

A fault strikes a rank of an attempt (TORCHELASTIC_RESTART_COUNT) when it begins the step: an exception, a
SIGKILL of itself, memory that there is not, a sleep without end, a stop (SIGSTOP) of itself.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from aorta.training import command, trainer  # noqa: E402

KINDS = ("exception", "sigkill", "oom", "hang")


def strike(kind: str) -> None:
    if kind == "exception":
        raise ValueError("planted")
    if kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "oom":
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
    if kind == "hang":
        time.sleep(3600)


def plant(faults: list[dict[str, Any]]) -> None:
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    mine = {f["step"]: f["kind"] for f in faults if (f["rank"], f["attempt"]) == (rank, attempt)}
    step = trainer.TrainingRun.step

    def planted(self: Any, global_step: int, feed: Any) -> Any:
        if global_step in mine:
            strike(mine[global_step])
        return step(self, global_step, feed)

    trainer.TrainingRun.step = planted  # type: ignore[method-assign]


if __name__ == "__main__":
    plant(json.loads(os.environ.get("FAULTS", "[]")))
    sys.exit(command.main(prog="train.py"))
