"""What programs of these tests come to, plain and under `aorta run`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN = [sys.executable, "-m", "aorta", "run", "--no-report", "-o"]
RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def outcome(file: Path, launch: list[str], program: Path, *arguments: str) -> dict[str, Any]:
    """What the program writes into the file, whose name it takes last."""
    command = [*launch, str(program), *arguments, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(file.read_text()))


def outcomes(folder: Path, launch: list[str], program: Path, *arguments: str) -> dict[str, Any]:
    """Of a run that is recorded in folder / "run", which comes to the same as two that are not."""
    plain, again = (outcome(folder / name, launch, program, *arguments) for name in ("plain", "again"))
    attached = [*RUN, str(folder / "run"), "--", *launch]
    recorded = outcome(folder / "attached", attached, program, *arguments)
    assert plain == again, "the program does not repeat itself"
    assert recorded == plain
    return recorded
