"""All of aorta off and on in turn in one process: what pairs tell, and that nothing is left when off."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from attached_cost import ratios_of, text_of

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import gc, json, sys
import torch
from torch.optim import optimizer as optimizers

def ours():
    engine = torch.autograd.graph._engine_run_backward
    replaced = [torch.save, torch.nn.Module.eval, torch.optim.Optimizer.__init__, torch.amp.GradScaler.step,
                torch.utils.data.DataLoader.__iter__, engine]
    hooks = [*optimizers._global_optimizer_pre_hooks.values(),
             *optimizers._global_optimizer_post_hooks.values(), *gc.callbacks]
    # A wrapper has the name of what it replaces; its code tells whose it is.
    return sorted(f.__qualname__ for f in [*replaced, *hooks] if "/aorta/" in f.__code__.co_filename)

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = []
for step in range(160):
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    seen.append(ours())
    optimizer.step()
    optimizer.zero_grad()
json.dump(seen, open(sys.argv[1], "w"))
"""


def rank(rows: list[list[object]]) -> dict[str, object]:
    stated = {"always_on": None, "always_on_interval": None, "step_ms": None, "step_interval_ms": None}
    """What one rank wrote. rows: set, kind, ms of time, of CPU and of the quickest step."""
    beside = {"left": [], "every": 64, "stated": stated, "planted_ms": 0.0, "threads_ms": {}}
    return {"rows": rows, **beside}


def test_a_pair_is_the_slowest_ranks_time_and_the_mean_of_cpu_time() -> None:
    slow = [[n, kind, 10.0 * ratio, 5.0 * ratio, 9.0] for n in range(8) for kind, ratio in PAIR]
    quick = [[n, kind, 8.0, 3.0, 9.0] for n in range(8) for kind, _ in PAIR]
    ratios, off_ms = ratios_of([rank(slow), rank(quick)])
    assert off_ms == pytest.approx(10.0)
    # CPU: (5.5 + 3) / (5 + 3).
    assert ratios["left_out"].tolist() == [pytest.approx([1.1, 1.0625, 1.0])] * 8


PAIR = (("off", 1.0), ("left_out", 1.1))


def test_a_block_that_could_not_be_switched_on_one_rank_is_in_no_pair() -> None:
    rows = [[n, kind, 10.0 * ratio, 5.0, 9.0] for n in range(8) for kind, ratio in PAIR]
    other = [[n, "cannot" if n == 0 else kind, *values] for n, kind, *values in rows]
    assert len(ratios_of([rank(rows), rank(other)])[0]["left_out"]) == 7


def test_a_recorded_step_has_what_its_block_took_with_the_switches() -> None:
    rows = [
        [n, kind, ms, ms, 9.0]
        for n in range(8)
        for kind, ms in (("off", 10.0), ("recorded", 10.8), ("off", 10.0))
    ]
    # 11 steps of 0.8 ms more are 8.8 ms, over 8 recorded steps 1.1 ms each.
    assert ratios_of([rank(rows)])[0]["recorded"][:, 0] == pytest.approx(8 * [1.11])


def test_nothing_of_aorta_is_in_the_process_while_it_is_off_and_all_of_it_while_on(tmp_path: Path) -> None:
    program, found = tmp_path / "train.py", tmp_path / "seen.json"
    program.write_text(PROGRAM)
    harness = [sys.executable, str(ROOT / "benchmarks" / "attached_cost.py"), "--recorded-every", "16"]
    command = [*harness, str(program), str(found)]
    attached = [sys.executable, "-m", "aorta", "run", "--no-report", "-o", str(tmp_path / "run"), "--"]
    told = subprocess.run([*attached, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    seen = json.loads(found.read_text())
    states = {tuple(names) for names in seen[60:]}
    assert () in states
    assert len(states) == 2, states
    (own,) = (tmp_path / "run").glob("attached_cost_*.json")
    text = text_of([json.loads(own.read_text())])
    assert "left_out" in text
    assert "left on" not in text
