"""Does `aorta run` record training programs that do not know of it, and leave them as they were?

    python benchmarks/clients.py [CLIENT...] --output clients.csv [--python PYTHON_WITH_LIBRARIES]
    python benchmarks/clients.py published --sources FOLDER --keep FOLDER [PROGRAM...] --output published.csv

Each runs as 2 gloo ranks without and with `aorta run`, nothing else changed. It is right where losses and
parameters are bit by bit the same, aorta says its closing line alone, all iterations have a step on every
rank, the collectives seen are as many as the process groups counted, and each step from the fourth on has as
many as were counted between the ends of its iterations.

The first form runs the loops of client_loops/, which write down themselves what they did; about 30 s each on
two cores. The second runs programs as they were published (client_loops/published.yaml), tiny, from checkouts
named OWNER+REPOSITORY; beside them, in both runs, client_loops/witness writes what each process did: losses,
a hash of the parameters after each call of an optimizer, how many collectives the process groups and
PyTorch's Flight Recorder counted. About a minute each.

Exit status 1 where one is not right.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from harness import ROOT, arguments, choose, write

LOOPS_FOLDER = ROOT / "benchmarks" / "client_loops"
LEARNED_STEPS = 3
"""The first steps also hold what happens once, and the cut between them is learned there."""
CLOSING_LINE = re.compile(r"aorta: rank 0: \d+ steps? recorded")


@dataclass(frozen=True)
class Client:
    """A loop of client_loops/ and what is expected of it."""

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
LIBRARIES = {
    "transformers": ("trainer",),
    "lightning": ("lightning", "fabric"),
    "accelerate": ("accelerate_accumulation",),
    "deepspeed": ("zero1", "zero2_accumulation", "zero3", "zero3_accumulation"),
}
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
    **{
        kind: Client("libraries.py", kind, package=package)
        for package, kinds in LIBRARIES.items()
        for kind in kinds
    },
    **{
        f"{package_kind}_accumulation": Client(
            "libraries.py", f"{package_kind}_accumulation", package=package, outside=True
        )
        for package, package_kind in (("transformers", "trainer"), ("lightning", "lightning"))
    },
}


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program of another project, as it was published.

    Its number of steps follows from its arguments and data, never from aorta.
    """

    source: str
    """Folder of the checkout."""
    folder: str
    """That it is started in, below the checkout."""
    command: str
    """Words behind python or torchrun; {data} is the folder of data made here."""
    steps: int
    """Optimizer steps of each rank."""
    ranks: int = 2
    """That train."""
    torchrun: bool = True
    devices: bool = False
    """Asks for GPUs: the witness shows it CPUs in their place."""
    outside: bool = False
    """Collectives between the optimizer's calls belong to no step (evaluation), or to the next."""
    options: list[str] = []
    """Options of `aorta run`."""
    links: dict[str, str] = {}
    """Names in the folder that stand for data made here."""
    variables: dict[str, str] = {}


@dataclass
class Result:
    """One row."""

    client: str
    right: bool = False
    wrong: list[str] = field(default_factory=list)
    identical: bool | None = None
    steps: int | None = None
    expected: int | None = None
    seen: int | None = None
    counted: int | None = None
    """Collectives that the process groups counted while recording could see them."""
    before: int | None = None
    """Counted before the process had a group and an optimizer, or a backward pass, when recording starts."""
    traced: int | None = None
    """Entries of PyTorch's Flight Recorder, which starts before training and has no sends and receives."""
    per_step: list[int] = field(default_factory=list)
    """Collectives of the last four steps of rank 0."""
    steps_at: str | None = None
    messages: list[str] = field(default_factory=list)
    """Lines that aorta printed beside its closing line."""


def loops() -> int:
    parser = own_arguments()
    parser.add_argument("client", nargs="*", metavar="CLIENT", help="all where none")
    parser.add_argument("--keep", type=Path, help="folder for logs and records")
    options = parser.parse_args()

    def judged(name: str, folder: Path) -> Result:
        client, result = CLIENTS[name], Result(name, expected=CLIENTS[name].steps)
        if client.package is not None and not is_installed(client.package, options.python):
            result.wrong.append("not installed")
        elif ran_twice(folder, result, lambda mode: launch_loop(client, folder, mode, options)):
            check_loop(client, folder, result)
        return result

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        return told(options.client or list(CLIENTS), options.keep or Path(name), judged, options)


def published() -> int:
    parser = own_arguments()
    parser.add_argument("program", nargs="*", metavar="PROGRAM", help="all where none")
    parser.add_argument("--sources", type=Path, required=True, help="folder of checkouts")
    parser.add_argument("--keep", type=Path, required=True, help="folder for logs, data and records")
    options = parser.parse_args()
    programs = msgspec.yaml.decode((LOOPS_FOLDER / "published.yaml").read_bytes(), type=dict[str, Program])
    make_data(options.keep / "data", options.python)

    def judged(name: str, folder: Path) -> Result:
        program, result = programs[name], Result(name, expected=programs[name].steps)
        source = options.sources / program.source
        if not source.exists():
            result.wrong.append(f"{source} is not there")
        elif ran_twice(folder, result, lambda mode: launch_program(program, source, folder, mode, options)):
            check_program(program, folder, result)
        return result

    return told(options.program or list(programs), options.keep, judged, options)


def own_arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__)
    parser.add_argument("--python", default=sys.executable, help="that has the libraries")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for one launch")
    return parser


def told(
    names: list[str], folder: Path, judged: Callable[[str, Path], Result], options: argparse.Namespace
) -> int:
    """Judge one after the other, print and write each row; the exit status."""
    rows: list[Result] = []
    for name in names:
        row = judged(name, folder / name)
        row.right = not row.wrong
        rows.append(row)
        print(
            f"{name:28} {'right' if row.right else 'WRONG'}  {row.steps} steps of {row.expected}, "
            f"{row.seen} collectives of {row.counted}; {'; '.join(row.wrong)}",
            flush=True,
        )
        write(options.output, [vars(row) for row in rows])
    return int(not all(row.right for row in rows if row.wrong != ["not installed"]))


def ran_twice(folder: Path, result: Result, launch: Callable[[str], int]) -> bool:
    """Run it without and with aorta; True where both ended well and there are records."""
    shutil.rmtree(folder, ignore_errors=True)
    for mode in ("without", "with"):
        (folder / mode).mkdir(parents=True)
        status = launch(mode)
        if status != 0:
            result.wrong.append(f"{mode} aorta: exit status {status}")
            return False
    lines = (folder / "with.log").read_text(errors="replace").splitlines()
    result.messages = [line for line in lines if line.startswith("aorta") and not CLOSING_LINE.match(line)]
    if result.messages:
        result.wrong.append("messages")
    if not (folder / "run" / "run.json").exists():
        result.wrong.append("no records")
        return False
    coverage = json.loads((folder / "run" / "run.json").read_text())["coverage"]
    groups = (coverage.get("groups") or {}).values()
    result.steps_at = coverage.get("steps_at")
    result.seen = sum(group["seen"] for group in groups)
    result.counted = sum(group["backend"] for group in groups)
    return True


def started(
    command: list[str], folder: Path, place: Path, mode: str, environment: dict[str, str], limit_s: float
) -> int:
    """Exit status of a command; 124 where it did not end in time."""
    with open(folder / f"{mode}.log", "w") as log:
        process = subprocess.Popen(
            command, cwd=place, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return 124


def environment_of(options: argparse.Namespace, *folders: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PATH": f"{Path(options.python).parent}{os.pathsep}{os.environ['PATH']}",
    }


def check_steps(folder: Path, rank: int, expected: int, counts: list[int] | None, result: Result) -> None:
    """Number of steps, and of collectives in those from the fourth on beside what was counted.

    counts: what the process groups had counted at the end of each iteration; None: not comparable.
    """
    path = folder / "run" / f"rank_{rank}_metrics.jsonl"
    if not path.exists():
        result.wrong.append(f"rank {rank}: no records")
        return
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    per_step = [step["num_collectives"] for step in steps if step["source"] in ("host", "events", "kernels")]
    if rank == 0:
        result.steps, result.per_step = len(per_step), per_step[-4:]
    if len(per_step) != expected:
        result.wrong.append(f"rank {rank}: {len(per_step)} steps of {expected}")
    if not counts:
        return
    counted = [later - earlier for earlier, later in zip(counts, counts[1:], strict=False)]
    num = min(len(per_step), len(counted)) - LEARNED_STEPS
    # A window may end at the optimizer and an iteration behind its logging: the sums agree, not each.
    if num > 0 and sum(per_step[-num:]) != sum(counted[-num:]) and per_step[-num:-1] != counted[-num:-1]:
        result.wrong.append(
            f"rank {rank}: {per_step[-num:]} collectives a step where {counted[-num:]} were counted"
        )


# ---- loops of client_loops/ ----------------------------------------------------------------------


def is_installed(package: str, python: str) -> bool:
    code = f"import importlib.util as u; raise SystemExit(u.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def launch_loop(client: Client, folder: Path, mode: str, options: argparse.Namespace) -> int:
    environment = environment_of(options, ROOT, ROOT / "benchmarks") | {
        "CLIENT_OUT": str(folder / mode),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    script = [str(LOOPS_FOLDER / client.script), client.kind]
    command = [options.python, *script]
    if not client.spawns:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        if client.package is None:  # the agent's import of torch is a third of such a launch
            launcher = [str(LOOPS_FOLDER / "two_ranks.py")]
        command = [options.python, *launcher, *script]
    if mode == "with":
        run = [options.python, "-m", "aorta", "run", "-o", str(folder / "run"), "--no-report", "--"]
        command = [*run, *command]
    return started(command, folder, folder, mode, environment, options.limit_s)


def check_loop(client: Client, folder: Path, result: Result) -> None:
    if result.seen != result.counted:
        result.wrong.append(f"{result.seen} collectives seen of {result.counted}")
    result.identical = True
    for rank in (0, 1):
        first, second = (
            json.loads((folder / mode / f"{rank}.json").read_text()) for mode in ("without", "with")
        )
        counts: list[int] = second["counts"]
        if client.outside:  # threads beside an iteration would change the counts at its end
            del first["counts"], second["counts"]
        result.identical &= first == second and bool(first["losses"] or rank > 0)
        expected = client.steps if rank == 0 or client.steps_rank_1 is None else client.steps_rank_1
        check_steps(folder, rank, expected, None if client.outside else counts, result)
    if not result.identical:
        result.wrong.append("losses or parameters differ")


# ---- published programs --------------------------------------------------------------------------


def make_data(folder: Path, python: str) -> None:
    """Make the data and the tiny models that the programs read."""
    if not (folder / "ready").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([python, str(LOOPS_FOLDER / "published_data.py"), str(folder)], check=True)
        (folder / "ready").touch()


def launch_program(
    program: Program, source: Path, folder: Path, mode: str, options: argparse.Namespace
) -> int:
    place, data = folder / f"source_{mode}", options.keep / "data"
    shutil.copytree(source / program.folder, place)
    environment = environment_of(options, LOOPS_FOLDER / "witness", ROOT, data / "modules") | {
        "WITNESS_OUT": str(folder / mode),
        "WITNESS_SEED": "1",
        "HF_HOME": str(options.keep / "hf"),
        "TORCH_FR_BUFFER_SIZE": "100000",
    }
    environment |= {"WITNESS_DEVICES": str(program.ranks)} if program.devices else {}
    environment |= program.variables
    words = [word.format(data=data) for word in shlex.split(program.command)]
    command = [options.python, *words]
    if program.torchrun:
        agent = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(program.ranks)]
        command = [options.python, *agent, *words]
    if mode == "with":
        run = [options.python, "-m", "aorta", "run", "-o", str(folder / "run"), "--no-report"]
        command = [*run, *program.options, "--", *command]
    for name, target in program.links.items():
        shutil.rmtree(place / name, ignore_errors=True)
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).symlink_to(data / target)
    return started(command, folder, place, mode, environment, options.limit_s)


def witnessed(folder: Path) -> list[dict[str, Any]]:
    """Documents of all processes; those of one rank and program are in the order of their losses."""
    documents = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    return sorted(
        documents, key=lambda document: (document["rank"], -len(document["digests"]), document["argv"])
    )


def check_program(program: Program, folder: Path, result: Result) -> None:
    names = ("rank", "losses", "digests", "counts", "before", "groups", "traced")
    first, second = (
        [{name: document[name] for name in names} for document in witnessed(folder / mode)]
        for mode in ("without", "with")
    )
    result.identical = first == second
    if not result.identical:
        result.wrong.append("losses, parameters or counts differ")
    ranks = [document for document in second if document["rank"] >= 0 or program.ranks == 1]
    zero = next((document for document in ranks if document["rank"] <= 0), None)
    if zero is None:
        result.wrong.append("the witness saw no rank 0")
        return
    result.before = zero["before"]
    result.counted = sum(zero["groups"].values()) - zero["before"]
    result.traced = sum(zero["traced"].values())
    if result.seen != result.counted:
        result.wrong.append(f"{result.seen} collectives seen of {result.counted}")
    for rank in range(program.ranks):
        counts: list[int] = next((one["counts"] for one in ranks if one["rank"] == rank), [])
        is_comparable = not program.outside and len(counts) == program.steps
        check_steps(folder, rank, program.steps, counts if is_comparable else None, result)


if __name__ == "__main__":
    sys.exit(choose(__doc__, {"loops": loops, "published": published}))
