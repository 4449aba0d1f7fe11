"""Does `aorta run` record training loops that do not know of it, and leave them as they were?

    python benchmarks/attach_clients.py [CLIENT...] --output clients.csv [--python PYTHON_WITH_LIBRARIES]

Each client of 2 gloo ranks runs without and with `aorta run`, nothing else changed. A client is right where
losses and parameters are bit by bit the same, aorta says its closing line alone, all iterations have a step
on both ranks, the collectives seen are as many as the process groups counted, and each step from the fourth
on has as many as were counted between the ends of its iterations. torchtitan and nanochat are read from
the folder of --clients, and left out without it. About 30 s a client on two cores.

Exit status 1 where a client is not right.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ROOT, arguments, write

HERE = ROOT / "benchmarks"
LEARNED_STEPS = 3
"""The first steps also hold what happens once, and the cut between them is learned there."""


@dataclass(frozen=True)
class Client:
    """A script and what is expected of it."""

    script: str
    kind: str
    steps: int = 12
    """Iterations that have a step."""
    steps_rank_1: int | None = None
    """Iterations of rank 1, if their number is another."""
    outside: bool = False
    """Collectives between iterations (evaluation) make single steps or gaps differ from what was counted."""
    package: str | None = None
    spawns: bool = False
    options: tuple[str, ...] = ()


LOOPS = (
    "ddp_plain", "fsdp2", "zero_redundancy", "two_optimizers_accumulation", "gan", "subclass_with_closure",
    "adam_then_lbfgs", "pipeline_gpipe", "pipeline_1f1b", "futures_on_a_thread", "loop_on_a_thread",
    "coroutine", "compiled_model", "optimizer_in_backward", "communication_hook", "local_sgd", "checkpointed",
)  # fmt: skip
STYLES = (
    "averaged", "no_sync", "long_accumulation", "generation",
    "compiled_ddp", "fsdp1", "tensor_parallel", "sequence_parallel", "post_local_sgd", "sharpness_aware",
    "own_handlers", "forked_data", "optimizer_per_epoch", "frozen_then_whole", "experts",
    "finder_then_training", "prefetching_thread", "leaves_at_once",
)  # fmt: skip
CLIENTS = {
    **{kind: Client("loops.py", kind) for kind in LOOPS},
    **{kind: Client("styles.py", kind) for kind in STYLES},
    "functional": Client("styles.py", "functional", steps=24),
    # Collectives of a thread are in whichever step is open.
    "checkpoint_in_background": Client("styles.py", "checkpoint_in_background", outside=True),
    # gloo numbers the sends and receives of a monitored barrier, not the barrier.
    "gossip": Client("styles.py", "gossip", outside=True),
    "diloco": Client("styles.py", "diloco", outside=True),  # the outer optimizer is learned at its first call
    "join": Client("styles.py", "join", steps_rank_1=9, outside=True),
    "policy_gradient": Client("loops.py", "policy_gradient", outside=True),
    "compiled_iteration": Client("loops.py", "compiled_iteration", steps=24),
    "compiled_optimizer": Client("loops.py", "compiled_optimizer", steps=24),
    "spawned": Client("loops.py", "spawned", spawns=True),
    "forked": Client("loops.py", "forked", spawns=True),
    "trainer": Client("libraries.py", "trainer", package="transformers"),
    "trainer_accumulation": Client(
        "libraries.py", "trainer_accumulation", package="transformers", outside=True
    ),
    "lightning": Client("libraries.py", "lightning", package="lightning"),
    "lightning_accumulation": Client(
        "libraries.py", "lightning_accumulation", package="lightning", outside=True
    ),
    "fabric": Client("libraries.py", "fabric", package="lightning"),
    "accelerate_accumulation": Client("libraries.py", "accelerate_accumulation", package="accelerate"),
    **{
        kind: Client("libraries.py", kind, package="deepspeed")
        for kind in ("zero1", "zero2_accumulation", "zero3", "zero3_accumulation")
    },
    **{
        f"torchtitan_{name}": Client("torchtitan", name, package="torchtitan", options=options)
        for name, options in {
            "fsdp": (),
            "tp": ("--parallelism.tensor_parallel_degree", "2"),
            "pp": ("--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "4",
                   "--parallelism.pipeline_parallel_schedule", "1F1B"),
        }.items()
    },
    "nanochat": Client("nanochat", "nanochat", package="nanochat"),
}  # fmt: skip


@dataclass
class Result:
    """One row."""

    client: str
    right: bool = False
    wrong: list[str] = field(default_factory=list)
    identical: bool | None = None
    steps: int | None = None
    seen: int | None = None
    counted: int | None = None
    per_step: list[int] = field(default_factory=list)
    """Collectives of the last four steps of rank 0."""
    steps_at: str | None = None
    messages: list[str] = field(default_factory=list)
    """Lines that aorta printed beside its closing line."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("client", nargs="*", metavar="CLIENT", help="all where none")
    parser.add_argument("--python", default=sys.executable, help="that has the libraries")
    parser.add_argument("--clients", type=Path, help="folder with launch.py of torchtitan and nanochat")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for one launch")
    parser.add_argument("--keep", type=Path, help="folder for logs and records")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = options.keep or Path(name)
        for client in options.client or CLIENTS:
            rows.append(judged(client, folder / client, options))
            print(json.dumps(vars(rows[-1])), flush=True)
            write(options.output, [vars(row) for row in rows])
    return int(not all(row.right for row in rows if row.wrong != ["not installed"]))


def judged(name: str, folder: Path, options: argparse.Namespace) -> Result:
    client, result = CLIENTS[name], Result(name)
    if not is_there(client, options):
        result.wrong.append("not installed")
        return result
    shutil.rmtree(folder, ignore_errors=True)
    for mode in ("without", "with"):
        (folder / mode).mkdir(parents=True)
        status = launch(client, folder, mode, options)
        if status != 0:
            result.wrong.append(f"{mode} aorta: exit status {status}")
            return result
    lines = (folder / "with.log").read_text(errors="replace").splitlines()
    result.messages = [line for line in lines if line.startswith("aorta") and " steps recorded" not in line]
    if result.messages:
        result.wrong.append("messages")
    if (folder / "run" / "run.json").exists():
        check(client, folder, result)
    else:
        result.wrong.append("no records")
    result.right = not result.wrong
    return result


def is_there(client: Client, options: argparse.Namespace) -> bool:
    if client.package is None:
        return True
    if client.package in ("torchtitan", "nanochat"):
        return options.clients is not None and (options.clients / "launch.py").exists()
    code = f"import importlib.util as u; raise SystemExit(u.find_spec({client.package!r}) is None)"
    return subprocess.run([options.python, "-c", code], check=False).returncode == 0


def launch(client: Client, folder: Path, mode: str, options: argparse.Namespace) -> int:
    """Exit status of the command; 124 where it did not end in time."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{HERE}",
        "CLIENT_OUT": str(folder / mode),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PATH": f"{Path(options.python).parent}{os.pathsep}{os.environ['PATH']}",
    }
    script, place = [str(HERE / "clients" / client.script), client.kind], folder
    if client.package in ("torchtitan", "nanochat"):
        script, place = shared_client(client, folder, environment, options.clients)
    command = [options.python, *script]
    if not client.spawns:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        if client.script in (
            "loops.py",
            "styles.py",
        ):  # the agent's import of torch is a third of such a launch
            launcher = [str(HERE / "clients" / "two_ranks.py")]
        command = [options.python, *launcher, *script]
    if mode == "with":
        run = [options.python, "-m", "aorta", "run", "-o", str(folder / "run"), "--no-report", "--"]
        command = [*run, *command]
    with open(folder / f"{mode}.log", "w") as log:
        try:
            return subprocess.run(
                command, cwd=place, env=environment, stdout=log, stderr=log, check=False,
                timeout=options.limit_s,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124


def shared_client(
    client: Client, folder: Path, environment: dict[str, str], home: Path
) -> tuple[list[str], Path]:
    """Script with its arguments, and the folder to start it in, of a client as it was published, tiny."""
    source = folder.parent / f"{client.script}_source"
    if not source.exists():
        shutil.copytree(home / "src" / ("titan" if client.script == "torchtitan" else "nanochat"), source)
    base = folder.parent / "nanochat_base"
    size = () if "--training.local_batch_size" in client.options else ("--training.local_batch_size", "2")
    environment |= {
        "PYTHONPATH": ":".join(map(str, (ROOT, home, home / "clients", home / "stubs", source))),
        "CLIENTS_CPU": "1", "STEPS": "12", "WARM": "2", "TIMED": "3", "PROFILED": "0",
        "HF_DATASETS_CACHE": str(folder.parent / "hf"), "TORCHDYNAMO_DISABLE": "1", "PYTHONUNBUFFERED": "1",
        "TORCH_FR_BUFFER_SIZE": "20000",
    }  # fmt: skip
    launcher = [str(home / "launch.py"), "plain"]
    if client.script == "torchtitan":
        return [
            *launcher, "torchtitan/train.py", "--experimental.custom_import", "flavors",
            "--job.config_file", "torchtitan/models/llama3/train_configs/debug_model.toml",
            "--training.steps", "12", "--debug.seed", "42", "--debug.deterministic",
            "--metrics.disable_color_printing", "--model.flavor", "tiny", "--training.seq_len", "128",
            *size, *client.options,
        ], source  # fmt: skip
    if not base.exists():
        shutil.copytree(home / "data" / "nanochat_base", base)
    environment["NANOCHAT_BASE_DIR"] = str(base)
    return [
        *launcher, "scripts/base_train.py", "--depth=2", "--aspect-ratio=32", "--head-dim=32",
        "--max-seq-len=64", "--device-batch-size=2", "--total-batch-size=512", "--device-type=cpu",
        "--window-pattern=L", "--num-iterations=12", "--eval-every=-1", "--core-metric-every=-1",
        "--sample-every=-1",
    ], source  # fmt: skip


def check(client: Client, folder: Path, result: Result) -> None:
    """Fill in the row."""
    run = json.loads((folder / "run" / "run.json").read_text())
    coverage = run["coverage"]
    groups = (coverage.get("groups") or {}).values()
    result.steps_at = coverage.get("steps_at")
    result.seen = sum(group["seen"] for group in groups)
    result.counted = sum(group["backend"] for group in groups)
    if result.seen != result.counted:
        result.wrong.append(f"{result.seen} collectives seen of {result.counted}")
    result.identical = True
    for rank in (0, 1):
        lines = (folder / "run" / f"rank_{rank}_metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        steps = [step for step in steps if step["source"] in ("host", "events", "kernels")]
        expected = client.steps if rank == 0 or client.steps_rank_1 is None else client.steps_rank_1
        if len(steps) != expected:
            result.wrong.append(f"rank {rank}: {len(steps)} steps of {expected}")
        result.identical &= is_identical(folder, rank, at_iterations=not client.outside)
        per_step = [step["num_collectives"] for step in steps]
        if rank == 0:
            result.steps, result.per_step = len(steps), per_step[-4:]
        if not client.outside:
            check_counts(folder, rank, per_step, result)
    if not result.identical:
        result.wrong.append("losses or parameters differ")


def is_identical(folder: Path, rank: int, at_iterations: bool) -> bool:
    """at_iterations: so are the counts at the end of each iteration, which threads beside it would change."""
    documents = [outcome(folder / mode, rank) for mode in ("without", "with")]
    names = ["losses", "digest", "hash", "groups", *(["counts"] if at_iterations else [])]
    first, second = ({name: document.get(name) for name in names} for document in documents)
    return first == second and bool(first["losses"] or rank > 0)


def outcome(folder: Path, rank: int) -> dict[str, Any]:
    """The document that the client itself wrote."""
    path = folder / f"{rank}.json"
    document: dict[str, Any] = json.loads(
        (path if path.exists() else folder / f"plain_rank{rank}.json").read_text()
    )
    return document


def check_counts(folder: Path, rank: int, per_step: list[int], result: Result) -> None:
    """The last steps beside what the process groups counted between the ends of iterations."""
    counts = outcome(folder / "with", rank).get("counts")
    if not counts:
        return
    counted = [later - earlier for earlier, later in zip(counts, counts[1:], strict=False)]
    num = min(len(per_step), len(counted)) - LEARNED_STEPS
    # A window may end at the optimizer and an iteration behind its logging: the sums agree, not each.
    if num > 0 and sum(per_step[-num:]) != sum(counted[-num:]) and per_step[-num:-1] != counted[-num:-1]:
        result.wrong.append(
            f"rank {rank}: {per_step[-num:]} collectives a step where {counted[-num:]} were counted"
        )


if __name__ == "__main__":
    sys.exit(main())
