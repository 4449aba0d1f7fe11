"""A sweep's trials: what is run, what is kept, and one sweep of real runs on gloo."""

import inspect
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from torch.distributed.elastic.multiprocessing.api import PContext

from aorta.account.results.schema import Interval, Metric, Point, read_document
from aorta.errors import RecordError
from aorta.records.schema import RunRecord
from aorta.sweep import trials as trial
from aorta.sweep.show import answer, ranked
from aorta.sweep.spec import ChoiceRange, Scalar, SweepSpec
from aorta.sweep.trials import ineffective, run_sweep, trial_command, trial_environment
from tests.dist.launch import run_python

ROOT = Path(__file__).resolve().parents[2]
GRID = SweepSpec(name="g", parameters={"a.x": [1, 2, 3]}, environment={"OMP_NUM_THREADS": [None, 4]})


class Trials:
    """In place of training: step_ms = 10 a.x, +/- 4; a.x = 3 fails."""

    def __init__(self) -> None:
        self.ran: list[dict[str, Scalar]] = []

    def __call__(self, spec: SweepSpec, configuration: Mapping[str, Scalar], folder: Path) -> Point:
        self.ran.append(dict(configuration))
        x = configuration["a.x"]
        assert isinstance(x, (int, float))
        if x == 3:
            return Point(configuration=dict(configuration), status="failed", reason="too much")
        found = Metric(
            value=10.0 * x, unit="ms", better="lower", interval=Interval(low=10.0 * x - 4, high=10.0 * x + 4)
        )
        return Point(configuration=dict(configuration), status="measured", metrics={spec.objective: found})


def test_every_combination_runs_once_and_the_best_is_first(tmp_path: Path) -> None:
    trials = Trials()
    document = run_sweep(GRID, tmp_path / "out", run=trials)
    assert trials.ran == list(GRID.grid())
    assert document == read_document(tmp_path / "out" / "sweep.json")
    assert document.kind == "training"
    assert [p.configuration["a.x"] for p in ranked(GRID, document.points)] == [1, 1, 2, 2]
    assert answer(GRID, document.points) == (
        "best step_ms 10.00 ms: x=1  OMP_NUM_THREADS=unset; within its noise: 1 of 3 others"
    )


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    first = Trials()

    def interrupted(spec: SweepSpec, configuration: Mapping[str, Scalar], folder: Path) -> Point:
        if len(first.ran) == 2:
            folder.mkdir(parents=True)
            (folder / "half").touch()
            raise KeyboardInterrupt
        return first(spec, configuration, folder)

    with pytest.raises(KeyboardInterrupt):
        run_sweep(GRID, tmp_path / "out", run=interrupted)
    assert len(read_document(tmp_path / "out" / "sweep.json").points) == 2
    second = Trials()
    document = run_sweep(GRID, tmp_path / "out", run=second)
    assert second.ran == list(GRID.grid())[2:]
    assert len(document.points) == 6
    assert len(list((tmp_path / "out" / "trials").glob("*.interrupted-1/half"))) == 1
    third = Trials()
    run_sweep(GRID, tmp_path / "out", run=third, retry_failed=True)
    assert third.ran == [c for c in GRID.grid() if c["a.x"] == 3]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    run_sweep(GRID, tmp_path / "out", run=Trials())
    other = msgspec.structs.replace(GRID, objective="exposed_ms")
    with pytest.raises(RecordError, match="holds a sweep with another objective"):
        run_sweep(other, tmp_path / "out", run=Trials())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    with pytest.raises(RecordError, match="is not empty and holds no sweep"):
        run_sweep(GRID, tmp_path / "full", run=Trials())


def test_optuna_proposes_and_goes_on_with_the_same(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs optuna (extra sweep)")
    spec = SweepSpec(name="o", method="optuna", trials=5, parameters={"a.x": ChoiceRange(low=0.5, high=2.5)})
    first = Trials()
    run_sweep(spec, tmp_path / "out", run=first)
    assert len(first.ran) == 5
    assert all(0.5 <= row["a.x"] <= 2.5 for row in first.ran)  # type: ignore[operator]
    second = Trials()
    more = msgspec.structs.replace(spec, trials=7)
    document = run_sweep(more, tmp_path / "out", run=second)
    assert len(second.ran) == 2
    assert len(document.points) == 7


def test_a_trial_gets_its_variables_before_it_starts() -> None:
    configuration: dict[str, Scalar] = {
        "env.NCCL_MAX_CTAS": 8,
        "env.NCCL_PROTO": None,
        "env.HSA_ENABLE_SDMA": False,
        "parallel.forward_prefetch": 2,
    }
    mine = {"NCCL_PROTO": "LL", "PATH": "/bin", "RANK": "3", "MASTER_ADDR": "here"}
    assert trial_environment(configuration, mine) == {
        "PATH": "/bin",
        "NCCL_MAX_CTAS": "8",
        "HSA_ENABLE_SDMA": "0",
    }
    spec = SweepSpec(name="s", ranks=2, overrides=["training.max_steps=5"])
    command = trial_command(spec, configuration, Path("/there"))
    assert command[-4:] == [
        "--override",
        "training.max_steps=5",
        "parallel.forward_prefetch=2",
        "training.output_dir=/there",
    ]
    assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def test_a_variable_that_did_not_arrive_is_a_failed_trial() -> None:
    run = RunRecord(
        started_unix_ns=0, world_size=1, command=[], config=None, model=None, layout=None, versions={},
        devices=[], environment={"NCCL_MAX_CTAS": "4"}, clock_anchors=[], coverage={}, placement=None,
    )  # fmt: skip
    assert ineffective({"env.NCCL_MAX_CTAS": 4, "a.x": 1}, run) is None
    wrong = ineffective({"env.NCCL_MAX_CTAS": 8}, run)
    assert wrong == "NCCL_MAX_CTAS was to be '8', in the run it was '4'"
    assert (
        ineffective({"env.NCCL_MAX_CTAS": None}, run)
        == "NCCL_MAX_CTAS was to be unset, in the run it was '4'"
    )


TINY = """
name: tiny
config: {root}/config/default.yaml
overrides: [training.max_steps=14, training.batch_size=1, model.hidden=16, model.ffn=24,
  model.num_layers=1, model.vocab_size=32, data.seq_len=8, logging.tensorboard=false,
  training.precision=fp32, training.device=cpu]
objective: step_ms
parameters:
  model.num_heads: [2, 3]
environment:
  OMP_NUM_THREADS: [1]
"""


def test_real_runs_one_of_which_cannot_be(tmp_path: Path) -> None:
    """Three heads do not divide a width of 16: that trial fails with the trainer's own line."""
    (tmp_path / "tiny.yaml").write_text(TINY.format(root=ROOT))
    script = ROOT / "scripts" / "sweep.py"
    result = run_python(script, tmp_path / "tiny.yaml", "--output", tmp_path / "out", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert result.stdout.startswith("best step_ms ")
    assert "1/2  step_ms " in result.stderr
    assert (tmp_path / "out" / "sweep.png").stat().st_size > 1000
    good, bad = read_document(tmp_path / "out" / "sweep.json").points
    assert good.status == "measured"
    assert good.metrics["step_ms"].interval is not None
    assert good.metrics["exposed_ms"].value is not None
    assert "in the run: OMP_NUM_THREADS=1" in good.notes
    assert bad.status == "failed"
    assert bad.reason is not None
    assert bad.reason.startswith("aorta train: ")


def test_a_folder_that_holds_something_else_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="is not a folder; give another --output"):
        run_sweep(GRID, tmp_path / "file", run=Trials())
    (tmp_path / "spec.json").write_text("[1]")
    with pytest.raises(RecordError, match="is not what a sweep was made from"):
        run_sweep(GRID, tmp_path, run=Trials())


def test_torchrun_has_time_to_end_ranks_that_do_not_listen() -> None:
    """It runs them in sessions of their own: were it killed before, they would keep the GPUs."""
    patience_s = inspect.signature(PContext.close).parameters["timeout"].default
    assert patience_s + 5 < trial._GRACE_S
