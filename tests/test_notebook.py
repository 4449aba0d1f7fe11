"""aorta.load and aorta.compare on the example runs."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import aorta
from aorta.errors import ReportError
from tests.traces.kineto_events import kernel

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "docs" / "example"


def test_steps_are_rows() -> None:
    run = aorta.load(EXAMPLE / "fsdp")
    assert list(run.steps.columns[:3]) == ["rank", "global_step", "source"]
    assert run.steps.groupby("rank").size().to_dict() == {0: 32, 1: 32}
    parts = run.steps[["compute_ms", "exposed_ms", "idle_ms"]].sum(axis=1)
    assert (parts - run.steps["step_ms"]).abs().max() < 1e-6
    assert run.steps["is_warmup"].sum() == 2 * run.judged.num_warmup


@pytest.mark.heavy
def test_collectives_are_rows_of_their_steps() -> None:
    run = aorta.load(EXAMPLE / "fsdp")
    per_step = run.collectives.groupby(["rank", "global_step"]).size()
    with_details = run.steps.set_index(["rank", "global_step"])["num_collectives"].loc[per_step.index]
    assert (per_step == with_details).all()
    assert (run.collectives["duration_ms"].dropna() >= 0).all()


@pytest.mark.heavy
def test_a_run_shows_itself() -> None:
    run = aorta.load(EXAMPLE / "fsdp")
    assert repr(run).startswith("fsdp: a step takes ")
    assert "<pre" in run._repr_html_()
    assert run.summary["source"] in ("host", "events")
    assert run.kernels.empty


def test_own_rules_tell_which_kernels_communicate(tmp_path: Path) -> None:
    trace, rules = tmp_path / "rank0.json", tmp_path / "rules.yaml"
    rows = [kernel(0, 40, name="my_exchange"), kernel(40, 50, name="gemm")]
    trace.write_text(json.dumps({"traceEvents": rows}))
    rules.write_text("communication:\n  - {pattern: my_exchange, op: all_to_all}\n")
    run = aorta.load(trace, comm_rules=rules)
    assert run.steps["comm_ms"].tolist() == [pytest.approx(0.040)]
    assert run.kernels["op"].tolist() == ["all_to_all", "kernel"]


@pytest.mark.heavy
def test_two_runs_are_compared_with_verdicts() -> None:
    comparison = aorta.compare(EXAMPLE / "ddp", aorta.load(EXAMPLE / "fsdp"))
    assert comparison.metrics.loc["step_ms", "verdict"] == comparison.verdicts["step_ms"]
    assert comparison.headline in comparison._repr_html_()


def test_a_run_is_not_compared_with_itself() -> None:
    with pytest.raises(ReportError, match="both the reference and the candidate"):
        aorta.compare(EXAMPLE / "ddp", EXAMPLE / "ddp")


@pytest.mark.heavy
def test_the_cells_of_the_example_notebook_show_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executed one after another, as a kernel does, without Jupyter: the last expression is what is shown."""
    monkeypatch.chdir(ROOT)
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    names: dict[str, Any] = {}
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells
    for cell in cells:
        *statements, last = ast.parse(cell).body
        exec(compile(ast.Module(statements, []), "cell", "exec"), names)
        assert isinstance(last, ast.Expr)
        shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        assert getattr(shown, "_repr_html_", None) or getattr(shown, "figure", None)
        assert len(shown) if hasattr(shown, "columns") else True
    assert all(not cell.get("outputs") for cell in notebook["cells"])  # nothing of a machine is kept
