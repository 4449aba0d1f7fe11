"""What a program's function holds goes when it returns, under `aorta run` as without: workers of a loader
that nobody lets go of are waited for at exit, five seconds each."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import LIMIT_S

PROGRAM = """
import weakref
import torch
import torch.distributed as dist

held = []

class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, number):
        return torch.full((4,), float(number))

def squared(out):
    return {squared}

class Net(torch.nn.Linear):
    def forward(self, batch):
        return squared(super().forward(batch))

def main():
    dist.init_process_group("gloo", init_method="file://{folder}/store", rank=0, world_size=1)
    model = Net(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = Batches()
    held.append(weakref.ref(batches))
    for batch in torch.utils.data.DataLoader(batches):
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()

main()
print("kept" if held[0]() is not None else "let go")
"""


@pytest.mark.parametrize(
    "squared",
    [
        pytest.param("out * out", id="counted"),
        pytest.param("out * out.sum().item()", id="no-count"),  # a copy without data has no value to read
    ],
)
def test_nothing_of_a_function_is_kept_when_it_has_returned(tmp_path: Path, squared: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(folder=tmp_path, squared=squared))
    run = [sys.executable, "-m", "aorta", "run", "--no-report", "-o", str(tmp_path / "run"), "--"]
    done = subprocess.run(
        [*run, sys.executable, str(script)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.stdout.split("\n")[0] == "let go", done.stdout + done.stderr
