"""Arguments for every subcommand that have something to work on in a small folder of inputs."""

from pathlib import Path

from click.testing import CliRunner, Result

from aorta.cli import main

ROOT = Path(__file__).resolve().parents[2]
QUIET = ("--no-page", "--no-perfetto", "--no-parquet")
PROJECTED = (
    "--model", "llama3-8b", "--gpu-arch", "mi355x", "--nodes", "1", "--gpus-per-node", "8",
    "--micro-batch-size", "1", "--global-batch-size", "64", "--seq-len", "4096", "--dtype", "bf16",
)  # fmt: skip
JSON = {
    "report": ("report", "fsdp", *QUIET),
    "compare": ("compare", "ddp", "fsdp", *QUIET),
    "why": ("why", "fsdp"),
    "top": ("top", "fsdp"),
    "doctor": ("doctor",),
    "queues list": ("queues", "list"),
    "program lint": ("program", "lint", "program.txt"),
    "program simulate": ("program", "simulate", "program.txt", "--comm-us", "10", "--gemm-us", "10"),
    "project performance": ("project", "performance", *PROJECTED),
    "project memory": ("project", "memory", *PROJECTED),
}
"""Commands that print results, with arguments for them; the others are in NO_RESULTS or ELSEWHERE."""
NO_RESULTS = {"run", "capture", "merge", "train", "demo", "queues profile", "program emit"}
"""Say what they did, or write a program."""
ELSEWHERE = {"ab", "gate", "sweep", "check", "hang", "queues run", "queues sweep", "queues run-priority",
             "queues compare", "queues probe",
             "program run", "program compare", "project explain", "project search",
             "project compare", "project sweep"}  # fmt: skip
"""Their JSON is tested beside them: tests/hang, tests/queues, tests/programs, tests/projection."""

PROGRAM_SIZES = ("--m", "24", "--n", "4", "--k", "8", "--rounds", "8")
QUEUE_SIZES = ("--iterations", "3", "--warmup", "0", "--no-pieces", "--no-switch")
OTHERS = {
    "run": ("run", "-o", "recorded", "--no-report", "--", "true"),
    "ab": ("ab", "-n", "3", "--metric", "wall_s", "-o", "tried", "--", "true", "--", "true"),
    "sweep": ("sweep", "--env", "X=1,2", "--metric", "wall_s", "-o", "swept", "--", "true"),
    "gate": ("gate", "ddp", "--baseline", "ddp", "--allow-cannot-tell"),
    "check": ("check", "-o", "checked", "--", "true"),
    "capture": ("capture", "running", "--timeout-s", "0"),
    "merge": ("merge", "fsdp"),
    "hang": ("hang", "stuck"),
    "train": ("train", "--config", "ddp", "training.max_steps=1"),
    "demo": ("demo", "-o", "demonstration"),
    "queues run": ("queues", "run", "hetero_kernels", "--streams", "2", *QUEUE_SIZES),
    "queues sweep": ("queues", "sweep", "hetero_kernels", "-s", "2", *QUEUE_SIZES),
    "queues run-priority": ("queues", "run-priority", "P1", "--streams", "1", *QUEUE_SIZES),
    "queues compare": ("queues", "compare", "--baseline", "queues.json", "--test", "queues.json"),
    "queues profile": ("queues", "profile", "hetero_kernels", "--streams", "2", "--profiler", "torch"),
    "queues probe": ("queues", "probe"),
    "program emit": ("program", "emit", "--tiles", "4"),
    "program run": ("program", "run", "alone.txt", *PROGRAM_SIZES),
    "program compare": ("program", "compare", "--op", "ag_gemm", *PROGRAM_SIZES),
    "project explain": ("project", "explain", *PROJECTED),
    "project search": (
        "project", "search", "--model", "llama3-8b", "--gpu-arch", "h100", "--gpus", "8",
        "--global-batch-size", "64",
    ),
    "project compare": ("project", "compare", *PROJECTED, "tp=2"),
    "project sweep": ("project", "sweep", *PROJECTED, "tp=1,2"),
}  # fmt: skip
EXAMPLES = JSON | OTHERS
"""For every command, arguments with which it works on the folder of the fixture `inputs`."""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], standalone_mode=True)
