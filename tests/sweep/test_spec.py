"""What a sweep's file may say; mistakes are found before anything runs."""

from pathlib import Path

import pytest

from aorta.errors import ConfigError
from aorta.sweep import spec as knobs
from aorta.sweep.spec import FILES, load_spec

ROOT = Path(__file__).resolve().parents[2]
WHOLE = """
name: mine
parameters:
  parallel.forward_prefetch: [0, 1]
environment:
  NCCL_MAX_CTAS: [null, 8]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(f"config: {ROOT}/config/fsdp.yaml\n{text}")
    return path


def test_a_grid_holds_every_combination(tmp_path: Path) -> None:
    spec = load_spec(written(tmp_path, WHOLE))
    assert list(spec.grid()) == [
        {"parallel.forward_prefetch": 0, "env.NCCL_MAX_CTAS": None},
        {"parallel.forward_prefetch": 0, "env.NCCL_MAX_CTAS": 8},
        {"parallel.forward_prefetch": 1, "env.NCCL_MAX_CTAS": None},
        {"parallel.forward_prefetch": 1, "env.NCCL_MAX_CTAS": 8},
    ]
    assert spec.num_trials() == 4
    assert not spec.maximizes()


def test_what_is_better_follows_from_the_metric(tmp_path: Path) -> None:
    assert load_spec(written(tmp_path, WHOLE + "objective: overlap_ratio\n")).maximizes()
    assert not load_spec(written(tmp_path, WHOLE + "objective: comm_ms.all_gather\n")).maximizes()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: a\n", "nothing is varied"),
        ("name: a\nparamters: {}\n", "paramters is no setting of a sweep, did you mean 'parameters'?"),
        (
            "name: a\nparameters: {parallel.forward_prefech: [1]}\n",
            "parallel.forward_prefech is not a setting, did you mean 'forward_prefetch'?",
        ),
        ("name: a\nparameters: {parallel.mode: [ddp, zero]}\n", "parallel.mode must be"),
        ("name: a\nparameters: {parallel.forward_prefetch: []}\n", "needs one value or more"),
        ("name: a\nparameters: {parallel.forward_prefetch: [1, 1]}\n", "each once"),
        ("name: a\nparameters: {optimizer.lr: {low: 0.1, high: 0.2}}\n", "a grid needs a list of values"),
        (
            "name: a\nmethod: optuna\nparameters: {optimizer.lr: {low: 0.2, high: 0.1}}\n",
            "cannot range from 0.2 to 0.1",
        ),
        (
            "name: a\nenvironment: {NCCL_MAX_CTA: [1]}\n",
            "NCCL_MAX_CTA is no variable that anything is known to read, did you mean 'NCCL_MAX_CTAS'?",
        ),
        ("name: a\nenvironment: {RCCL_FAST_MODE: [1]}\n", "is no variable that anything is known to read"),
        ("name: a\nenvironment: {lower: [1]}\n", "capital letters"),
        (WHOLE + "objective: step_time\n", "step_time is no metric of the report, did you mean 'step_ms'?"),
        (WHOLE + "objective: hidden_ms\n", "neither better nor worse when it grows: give a goal"),
        (WHOLE + "ranks: 0\n", "ranks"),
        ("name: ../up\nparameters: {optimizer.lr: [0.1]}\n", "cannot be the name of a folder"),
        (WHOLE + "overrides: [parallel.dp=3]\nranks: 2\n", "parallel.dp"),
        ("name: [\n", "not valid YAML"),
        ("name: a\nparameters: {optimizer.lr: [.nan, 0.1]}\n", "optimizer.lr has a value that is no finite"),
        (
            "name: a\nmethod: optuna\nparameters: {optimizer.lr: {low: 0.1, high: .inf}}\n",
            "optimizer.lr has a value that is no finite number",
        ),
        (
            "name: a\nmethod: optuna\nparameters: {training.seed: {low: 1, high: 9, step: 0}}\n",
            "training.seed cannot go in steps of 0",
        ),
        (
            "name: a\nparameters: {training.output_dir: [a, b]}\n",
            "training.output_dir is a folder of the sweep",
        ),
        (WHOLE + "overrides: [training.output_dir=a]\n", "training.output_dir is a folder of the sweep"),
    ],
)
def test_a_mistake_is_one_line(text: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_spec(written(tmp_path, text))
    assert line in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_config_is_found_in_the_repository_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sweep.yaml"
    path.write_text("name: a\nparameters: {optimizer.lr: [0.1]}\n")
    assert load_spec(path).config == str(ROOT / "aorta" / "config" / "files" / "default.yaml")


def test_the_library_decides_where_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"\x7fELF\0NCCL_MAX_CTAS\0NCCL_FROM_NEXT_YEAR\0NCCL_PROTOCOL\0")
    monkeypatch.setattr(knobs, "_library", lambda: library)
    knobs.check_knob("NCCL_MAX_CTAS")
    knobs.check_knob("NCCL_FROM_NEXT_YEAR")  # newer than the list
    with pytest.raises(ConfigError, match=r"libnccl.so.2 does not read it"):
        knobs.check_knob("NCCL_PROTO")
    knobs.check_knob("OMP_NUM_THREADS")  # no matter of that library


@pytest.mark.parametrize("path", sorted(FILES.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_sweeps_that_come_with_it_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "_library", lambda: None)
    assert load_spec(path).num_trials() >= 4
    assert load_spec(f"config/sweeps/{path.name}") == load_spec(path)
