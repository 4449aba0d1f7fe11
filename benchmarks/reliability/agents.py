"""Two agents of torchrun on one machine, elastic jobs and a job that Slurm queues again: is each one run?

    python benchmarks/reliability/agents.py --output agents_gloo.json [--only NAME ...]

The agents meet by c10d on this machine, each with two ranks and an address of its own (127.0.0.x), as two
nodes with a folder in common. A case is right where run.json has one run id and an attempt for each start
with the expected number of ranks and the expected ending, nothing was moved aside, and the report reads every
step. CPUs and gloo. Exit status 1 where a case is not right.

torch's agents share one store over their rounds, and gloo's keys of an earlier round keep the next from
connecting, with aorta and without. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each round a store of its own.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from aorta.errors import AortaError  # noqa: E402
from aorta.records.reader import read_run  # noqa: E402
from aorta.report.load.open import load_run  # noqa: E402

NUM_STEPS = 40
LIMIT_S = 400.0
TRAIN = """
import faulthandler, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist, aorta
folder, num_steps, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
fault = os.environ.get("FAULT", "").split()
rank, attempt = os.environ["RANK"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
faulthandler.register(signal.SIGUSR1)
torch.set_num_threads(1)
dist.init_process_group("gloo")
done, values = folder / "next_step", torch.ones(64)
first = torch.tensor([int(done.read_text()) if done.exists() else 0])
dist.broadcast(first, 0)
with aorta.instrument(folder / "run") as recorder:
    for number in range(int(first), num_steps):
        with recorder.step(global_step=number):
            if [rank, attempt, str(number)] == fault:
                raise RuntimeError("planted")
            dist.all_reduce(values)
            time.sleep(step_s)
        if rank == "0":
            beside = folder / "next_step.tmp"
            beside.write_text(str(number + 1))
            beside.replace(done)
    dist.barrier()
dist.destroy_process_group()
"""


class Job:
    """Agents of one job, in a folder."""

    def __init__(self, folder: Path, step_s: float = 0.02, num_steps: int = NUM_STEPS) -> None:
        self.folder, self.output = folder, folder / "run"
        self._script = folder / "train.py"
        self._script.write_text(TRAIN)
        self._arguments = [str(self._script), str(folder), str(num_steps), str(step_s)]
        self._port = free_port()
        self._agents: list[subprocess.Popen[bytes]] = []

    def start(
        self, address: str, nodes: str, hosts_store: bool, **environment: str
    ) -> subprocess.Popen[bytes]:
        """An agent of two ranks."""
        command = [
            "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc_per_node", "2", "--max-restarts", "3",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "job",
            "--rdzv-conf", f"is_host={hosts_store},last_call_timeout=3,keep_alive_interval=1,"
            "keep_alive_max_attempt=3,join_timeout=60",
            "--local-addr", address, "--monitor-interval", "0.5",
        ]  # fmt: skip
        return self._run(command, f"agent_{len(self._agents)}", environment)

    def start_alone(self, **environment: str) -> subprocess.Popen[bytes]:
        """Two ranks without a job's name, as `srun torchrun --standalone` starts them."""
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        return self._run(command, f"agent_{len(self._agents)}", environment)

    def _run(self, command: list[str], name: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "LOGLEVEL": "INFO",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with open(self.folder / f"{name}.log", "wb") as log:
            agent = subprocess.Popen(
                [sys.executable, *command, *self._arguments],
                stdout=log, stderr=log, env=env | environment, cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        self._agents.append(agent)
        return agent

    def wait_for_step(self, number: int) -> None:
        """Returns once rank 0 has ended that step."""
        done = self.folder / "next_step"
        wait_until(lambda: done.exists() and int(done.read_text()) > number, f"step {number}")

    def wait_for_attempts(self, num_attempts: int) -> None:
        def have_begun() -> bool:
            with suppress(AortaError):
                return len(read_run(self.output).attempts) >= num_attempts
            return False

        wait_until(have_begun, f"attempt {num_attempts - 1}")

    def close(self) -> None:
        for agent in self._agents:
            for pid in family(agent.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait()

    def dump(self) -> None:
        """Has every rank write where it stands."""
        for agent in self._agents:
            for pid in family(agent.pid)[1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)

    def logs(self) -> list[str]:
        return [path.read_text(errors="replace")[-6000:] for path in sorted(self.folder.glob("*.log"))]


def family(pid: int) -> list[int]:
    """A process and all that it has started, workers in sessions of their own among them."""
    import psutil

    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.Error:
        return []


def lose(agent: subprocess.Popen[bytes]) -> None:
    """The node of an agent goes away: it and its ranks are killed at once."""
    for pid in family(agent.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} was not reached in {LIMIT_S:.0f} s")
        time.sleep(0.05)


Expected = list[tuple[int, str]]
"""By attempt: number of ranks and kind of the ending."""


def restart(job: Job) -> Expected:
    """A rank of the second agent raises; both agents start their ranks again."""
    agents = [job.start(f"127.0.0.{2 + n}", "2", n == 0, FAULT="3 0 12") for n in range(2)]
    for agent in agents:
        agent.wait(LIMIT_S)
    return [(4, "crashed"), (4, "finished")]


def elastic(job: Job, address: str = "127.0.0.4") -> Expected:
    """The second agent is lost, and a third one comes: 4, 2, 4 ranks."""
    first, second = (job.start(f"127.0.0.{2 + n}", "1:2", n == 0) for n in range(2))
    job.wait_for_step(3)
    lose(second)
    job.wait_for_attempts(2)
    job.wait_for_step(6)
    third = job.start(address, "1:2", False)
    for agent in (first, third):
        agent.wait(LIMIT_S)
    return [(4, "killed"), (2, "killed"), (4, "finished")]


def elastic_with_another_rank_0(job: Job) -> Expected:
    """The same, and the third agent's address comes first: rank 0 is on an agent that is new."""
    return elastic(job, "127.0.0.1")


def requeue(job: Job) -> Expected:
    """Slurm queues the job again: the same job id, one more restart."""
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train"}
    first = job.start_alone(**slurm)
    job.wait_for_step(8)
    lose(first)
    job.start_alone(**slurm, SLURM_RESTART_COUNT="1").wait(LIMIT_S)
    return [(2, "killed"), (2, "finished")]


CASES: dict[str, tuple[Callable[[Job], Expected], float]] = {
    "two_agents_restart": (restart, 0.02),
    "elastic_4_2_4": (elastic, 2.0),
    "elastic_4_2_4_another_rank_0": (elastic_with_another_rank_0, 2.0),
    "slurm_requeue": (requeue, 0.1),
}
"""With the seconds of a step: so long that the agents come and go in the middle."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = []
    for name in options.only:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            results.append(tried(name, Path(folder)))
        print(json.dumps(results[-1], indent=1), flush=True)
    num_right = sum(result["right"] for result in results)
    print(f"{num_right} of {len(results)} are one run with one report")
    if options.output is not None:
        import torch

        about = {"command": " ".join(["python", *sys.argv]), "torch": str(torch.__version__)}
        options.output.write_text(json.dumps(about | {"cases": results}, indent=1) + "\n")
    return 0 if num_right == len(results) else 1


def tried(name: str, folder: Path) -> dict[str, Any]:
    case, step_s = CASES[name]
    job, start_s = Job(folder, step_s), time.monotonic()
    result: dict[str, Any] = {"case": name}
    try:
        expected = case(job)
        wrong = judged(job, expected, result)
    except (TimeoutError, subprocess.TimeoutExpired, AortaError) as error:
        wrong = [str(error)]
        job.dump()
    finally:
        job.close()
    result |= {"s": round(time.monotonic() - start_s, 1), "wrong": wrong, "right": not wrong}
    return result if not wrong else result | {"logs": job.logs()}


def judged(job: Job, expected: Expected, result: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    run = read_run(job.output)
    result["attempts"] = [
        {
            "ranks": attempt.world_size,
            "first_step": attempt.first_step,
            "last_steps": attempt.last_steps,
            "ending": None if attempt.ending is None else attempt.ending.kind,
            "why": None if attempt.ending is None else attempt.ending.why,
            "of_ranks": [] if attempt.ending is None else attempt.ending.ranks,
        }
        for attempt in run.attempts
    ]
    wrong = []
    seen = [(attempt["ranks"], attempt["ending"]) for attempt in result["attempts"]]
    if seen != expected:
        wrong.append(f"attempts {seen}, not {expected}")
    if list(job.output.glob("previous-*")):
        wrong.append("an attempt was moved aside")
    report = load_run(job.output, "joined")
    result["notes"] = report.notes
    # Steps of another number of ranks are not put beside the others, nor what a killed rank had not closed; a
    # note says so.
    excused: set[int] = set()
    for attempt in run.attempts:
        lasts = [last or 0 for last in attempt.last_steps]
        is_of_others = attempt.world_size != len(report.ranks)
        first = (attempt.first_step or 0) if is_of_others else 1 + min(lasts)
        excused |= set(range(first, 1 + max(lasts)))
    missing = set(range(NUM_STEPS)) - set(report.global_step.tolist())
    if missing - excused or missing and not any("are left out" in note for note in report.notes):
        wrong.append(f"the report lacks steps {sorted(missing)}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
