"""Planted hangs: who is named, how long after the hang, and what is left of the records.

    python benchmarks/hang.py --ranks 2 --output hang.json

On GPUs over NCCL, else on the CPU over gloo. Each case is a run of its own under torchrun that trains
nothing but does what a step does (matrix products, an all-reduce, an all-gather, a reduce-scatter); in step
6 rank 1 skips the all-reduce, or sleeps. hang.action is abort, so that the run ends by itself.

Exit status 1 where a rank or a collective was named wrongly, too late, or records of finished steps are lost.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402

CASES = ("sleeps", "skips")
HANGS_IN_STEP = 6
LATE_RANK = 1
PER_STEP = 3
"""Collectives."""
NUM_STEPS = 100_000
ALLOWED_S = 5.0
"""Beyond the time limit."""
RUN_LIMIT_S = 60.0
PLANTED = "planted_unix_ns"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=4.0, help="hang.timeout_s")
    parser.add_argument("--output", type=Path, default=Path("hang.json"))
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, options.folder, options.timeout)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = [run_case(case, Path(folder) / case, options) for case in CASES]
    from aorta.device.environment import collect_devices, collect_versions

    about = {"versions": collect_versions(), "devices": collect_devices(), "num_ranks": options.ranks}
    document = {**about, "timeout_s": options.timeout, "results": results}
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    show(results)
    return 0 if all(result["right"] for result in results) else 1


# ---- the ranks ---------------------------------------------------------------------------------


def work(case: str, folder: Path, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    import aorta
    from aorta.config import HangConfig
    from aorta.profilers.hang import Watchdog

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    store = PrefixStore("hang-benchmark", dist.distributed_c10d._get_default_store())
    side, numel = (2048, 1 << 22) if on_gpu else (64, 1 << 12)
    a = torch.randn(side, side, device=device)
    gradient = torch.ones(numel, device=device)
    shard, gathered = torch.ones(numel // world_size, device=device), torch.empty(numel, device=device)
    hang = HangConfig(timeout_s=timeout_s, action="abort")
    with (
        aorta.instrument(folder, placement="dedicated", device=device) as recorder,
        Watchdog(hang, folder, rank, world_size, recorder=recorder, store=store, device=device) as watchdog,
    ):
        for step in range(NUM_STEPS):
            watchdog.beat(step)
            planted = rank == LATE_RANK and step == HANGS_IN_STEP
            if planted:
                if on_gpu:
                    torch.cuda.synchronize()  # so that the steps before are over when it begins
                (folder / PLANTED).write_text(str(time.time_ns()))
            with recorder.step(global_step=step):
                if planted and case == "sleeps":
                    time.sleep(RUN_LIMIT_S)
                b = a @ a
                if not (planted and case == "skips"):
                    dist.all_reduce(gradient)
                dist.all_gather_into_tensor(gathered, shard)
                b = b @ a
                dist.reduce_scatter_tensor(shard, gathered)
            if step < HANGS_IN_STEP and on_gpu:
                torch.cuda.synchronize()


# ---- what came of it ---------------------------------------------------------------------------


def run_case(case: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    from aorta.errors import AortaError
    from aorta.profilers.hang.find import find, sentence
    from aorta.profilers.hang.schema import flight_recorder_name, read_reports
    from aorta.records.reader import read_steps

    folder.mkdir(parents=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks),
        __file__, "--worker", case, "--folder", str(folder), "--timeout", str(options.timeout),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    started_s = time.monotonic()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate()
    wall_s = time.monotonic() - started_s
    time.sleep(1.0)  # records are written by a process of their own, which outlives the rank
    result: dict[str, Any] = {"case": case, "wall_s": wall_s, "exit_status": process.returncode}
    try:
        reports = read_reports(folder)
        found = find(reports)
    except AortaError as error:
        return {**result, "right": False, "fault": str(error), "output": output[-4000:]}
    planted_ns = int((folder / PLANTED).read_text())
    said = [line for line in output.splitlines() if line.startswith("hang: ")]
    seq = PER_STEP * HANGS_IN_STEP
    steps = {
        rank: [record.global_step for record in read_steps(folder / f"rank_{rank}_metrics.jsonl", [])]
        for rank in range(options.ranks)
    }
    result |= {
        "kind": found.kind,
        "named_ranks": found.ranks,
        "seq": None if found.block is None else found.block.seq,
        "expected_seq": seq,
        "sentence": sentence(found),
        "said_in_the_log": said[:1],
        "reported_after_s": (max(r.written_unix_ns for r in reports) - planted_ns) / 1e9,
        "limit_s": options.timeout + ALLOWED_S,
        "num_reports": len(reports),
        "whole_steps_recorded": {str(rank): len(rows) for rank, rows in steps.items()},
        "flight_recorders": [(folder / "hang" / flight_recorder_name(r.rank)).exists() for r in reports],
        "device": None if reports[0].device is None else msgspec.to_builtins(reports[0].device),
    }
    whole = all(rows[:HANGS_IN_STEP] == list(range(HANGS_IN_STEP)) for rows in steps.values())
    result["right"] = (
        found.ranks == [LATE_RANK]
        and result["seq"] == seq
        and "all_reduce" in result["sentence"]
        and result["reported_after_s"] < result["limit_s"]
        and len(reports) == options.ranks
        and whole
    )
    if not result["right"]:
        result["output"] = output[-4000:]
        result["reports"] = [msgspec.to_builtins(report) for report in reports]
    return result


def show(results: list[dict[str, Any]]) -> None:
    print(f"{'case':8s} {'named':8s} {'#':>4s} {'after':>8s} {'limit':>8s}  {'steps kept':12s} right")
    for result in results:
        if "fault" in result:
            print(f"{result['case']:8s} {result['fault']}\n{result['output']}")
            continue
        named = ",".join(map(str, result["named_ranks"])) or "-"
        kept = "/".join(map(str, result["whole_steps_recorded"].values()))
        seq = "-" if result["seq"] is None else result["seq"]
        print(
            f"{result['case']:8s} rank {named:3s} {seq!s:>4s} {result['reported_after_s']:6.1f} s "
            f"{result['limit_s']:6.1f} s  {kept:12s} {'yes' if result['right'] else 'NO'}"
        )
        print(f"         {result['sentence']}")


if __name__ == "__main__":
    sys.exit(main())
