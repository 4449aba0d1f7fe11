"""Several ranks: one answer from all of them, mistakes said once and before any process group."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from aorta.account.results.schema import read_document
from aorta.device.ranks import Ranks, choose_device, own_group, ranks_from_environment
from aorta.errors import ConfigError
from aorta.queues.cli import main
from aorta.queues.harness.measure import measure_point
from tests.dist.launch import run_command, run_ranks
from tests.queues.sleep_workloads import Overlap, plan


def queues_command(arguments: list[str]) -> int:
    main(arguments, prog_name="aorta.hw_queue_eval")
    return 0


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size),
                        ("LOCAL_WORLD_SIZE", world_size), ("MASTER_ADDR", "localhost")):  # fmt: skip
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_says_what_is_wrong_before_any_process_group(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    as_rank(monkeypatch, rank, 2)
    arguments = ["run", "comms_compute_overlap", "-s", "2", "--process-groups", "[0],[2]"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    message = "error: --process-groups must hold each of the 2 ranks exactly once (0 to 1), got [0], [2]\n"
    assert result.stderr == (message if rank == 0 else "")
    assert not dist.is_initialized()


def test_ranks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_from_environment() == Ranks()
    as_rank(monkeypatch, 1, 4)
    found = ranks_from_environment()
    assert (found.rank, found.world_size, found.launched, found.backend) == (1, 4, True, None)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(ConfigError, match="RANK = 4 must be below WORLD_SIZE = 4"):
        ranks_from_environment()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK must be a number, got 'first'"):
        ranks_from_environment()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ConfigError, match="needs MASTER_ADDR"):
        ranks_from_environment()


def test_several_ranks_do_not_share_a_gpu() -> None:
    with pytest.raises(ConfigError, match="several ranks need a GPU each"):
        choose_device("cuda:0", Ranks(rank=1, local_rank=1, world_size=2, local_world_size=2))


def one_rank() -> dict[str, object]:
    """In a process of its own, with the default group ready: what it gathers, its group, and its point."""
    rank = dist.get_rank()
    ranks = Ranks(rank, rank, 2, 2, True, torch.device("cpu"), "gloo")
    gathered = ranks.gather({"rank": rank, "text": "x" * rank})
    mine = own_group(ranks, [[1], [0]])
    point = measure_point(plan(Overlap, comm_ms=2.0 + 4.0 * rank, iterations=8, leg_rounds=0), ranks)
    apart = measure_point(
        plan(Overlap, process_groups=((0,), (1,)), iterations=2, leg_rounds=0, piece_iterations=0), ranks
    )
    return {
        "gathered": gathered,
        "group": dist.get_process_group_ranks(mine),
        "status": point.status,
        "num_ranks": len(point.ranks),
        "units_per_s": point.metrics["units_per_s"].value,
        "mean_ms": point.metrics["latency_mean_ms"].value,
        "skew_ms": point.skew_ms.value if point.skew_ms else None,
        "collectives": point.collectives,
        "apart": apart.reason or apart.status,
    }


def test_all_ranks_count() -> None:
    first, second = run_ranks(one_rank, 2)
    assert first["gathered"] == second["gathered"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}]
    assert (first["group"], second["group"]) == ([0], [1])
    for found in (first, second):
        assert found["status"] == "measured"  # the sum of both ranks arrived
        assert found["apart"] == "measured"  # and of each rank's own group only
        assert found["num_ranks"] == 2
        assert found["collectives"] == "real"
        # One unit a rank and iteration; the slowest rank's time.
        assert found["units_per_s"] == pytest.approx(2e3 / found["mean_ms"], rel=0.2)
        assert found["skew_ms"] is not None
    assert first["units_per_s"] == second["units_per_s"]


def test_ranks_of_a_launcher_leave_one_document(tmp_path: Path) -> None:
    """With torchrun's variables; that torchrun starts the command is for tests/training/test_command.py."""
    output = tmp_path / "a.json"
    arguments = [
        "run", "comms_compute_overlap", "--streams", "3", "--backend", "gloo", "--real-collectives",
        "--async-op", "--compute-streams", "2", "--num-compute", "4", "--mm-dim", "32",
        "--process-groups", "[0,1]", "--comm-size", "4K", "--iterations", "8", "--warmup", "1", "--profile",
        "--profile-dir", str(tmp_path / "traces"), "--json", "--output", str(output),
    ]  # fmt: skip
    exit_codes, stdout, errors = run_command(queues_command, arguments, 2)
    assert exit_codes == [0, 0], errors[-2000:]
    assert json.loads(stdout) == json.loads(output.read_text())
    found = read_document(output)
    (point,) = found.points
    assert point.status == "measured"
    assert [run.rank for run in point.ranks] == [0, 1]
    assert all(run.check.ok for run in point.ranks)
    assert (point.collectives, found.setting.backend, found.setting.world_size) == ("real", "gloo", 2)
    assert point.metrics["hidden_ms"].value is not None
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        f"comms_compute_overlap_streams3_rank{rank}.pt.trace.json" for rank in range(2)
    ]
