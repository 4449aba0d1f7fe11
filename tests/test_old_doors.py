"""Commands of the documents that this project came from, literally: each is taken as it was written.

Taken means that its program is there, its arguments are understood and its settings are legal; tests of each
program say what it then does. The documents are README.md and docs/ of ROCm/aorta of December 2025; what is
no longer taken is in docs/promises.md.
"""

import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from aorta.config.layout import validate
from aorta.config.load import load_config
from aorta.errors import ConfigError
from aorta.queues.cli import main as queues
from aorta.training.command import training_parser

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = """
python -m aorta.hw_queue_eval list
python -m aorta.hw_queue_eval run hetero_kernels --streams 8
python -m aorta.hw_queue_eval run hetero_kernels --streams 8 --sync-mode per_iteration
python -m aorta.hw_queue_eval run hetero_kernels --streams 8 --sync-mode end_only
python -m aorta.hw_queue_eval run hetero_kernels --streams 8 --sync-mode none
python -m aorta.hw_queue_eval run hetero_kernels --iterations 100 --warmup 10 --output results.json
python -m aorta.hw_queue_eval sweep hetero_kernels --streams 1,2,4,8,16
python -m aorta.hw_queue_eval run-priority P0
python -m aorta.hw_queue_eval compare --baseline results_a.json --test results_b.json
python -m aorta.hw_queue_eval profile hetero_kernels --streams 8
torchrun --nproc_per_node 4 train.py --config config/default.yaml --override training.max_steps=100
torchrun --nproc_per_node 4 train.py --config config/default.yaml --override profiling.enabled=true \
--override profiling.wait=1 --override profiling.warmup=1 --override profiling.active=2
torchrun --nproc_per_node 4 train.py --config config/default.yaml --override compile.enabled=true \
compile.backend=inductor compile.mode=max-autotune
bash scripts/launch_rocm.sh config/default.yaml
bash scripts/launch_cuda.sh config/default.yaml
bash scripts/rocprof_capture.sh config/default.yaml --override training.max_steps=50
bash scripts/hw_queue/profile_queues.sh hetero_kernels 8
python scripts/analyze_sweep_results.py --baseline sweep_v1.json --test sweep_v2.json
python analysis/overlap_report.py --log-dir artifacts_rocm --label rocm --log-dir artifacts_cuda \
--label cuda --output reports/2024-roc-vs-cuda --reference cuda --candidate rocm
"""


def literal() -> list[str]:
    return COMMANDS.strip().replace("\\\n", "").splitlines()


@pytest.mark.parametrize("command", [c for c in literal() if "hw_queue_eval" in c])
def test_a_command_of_the_queues_is_understood(command: str) -> None:
    name, *arguments = shlex.split(command)[3:]
    subcommand = queues.get_command(click.Context(queues), name)
    assert subcommand is not None, f"there is no {name}"
    subcommand.make_context(name, arguments)


@pytest.mark.parametrize("command", [c for c in literal() if "train.py" in c])
def test_training_takes_the_settings(command: str) -> None:
    words = shlex.split(command)
    place = words.index("train.py")
    assert (ROOT / "train.py").exists()
    parser = training_parser()
    options = parser.parse_args(words[place + 1 :])
    config = load_config(str(ROOT / options.config), options.override)
    validate(config, int(words[words.index("--nproc_per_node") + 1]))


@pytest.mark.processes
@pytest.mark.parametrize("command", [c for c in literal() if "scripts/" in c or "analysis/" in c])
def test_a_script_is_there_and_names_its_arguments(command: str) -> None:
    interpreter, script, *arguments = shlex.split(command)
    files = [word for word in arguments if word.endswith(".yaml")]
    assert all((ROOT / name).exists() for name in (script, *files))
    if interpreter == "bash":
        subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
        assert (
            "--help" in (ROOT / script).read_text() or "help" in (ROOT / "scripts" / "launch.sh").read_text()
        )
    else:
        help_text = subprocess.run(
            [sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True, check=True
        ).stdout
        assert not [word for word in arguments if word.startswith("--") and word not in help_text]


def test_what_is_no_longer_taken_is_one_line_that_says_what_is() -> None:
    overrides = ["dataloader.num_workers=8"]
    with pytest.raises(ConfigError, match="dataloader is not a setting; the top level has training, model"):
        load_config(str(ROOT / "config" / "default.yaml"), overrides)
