"""The house of the tests, and the map for who comes new."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.dist import launch
from tests.tiers import FIRST, leaves_the_process

ROOT = Path(__file__).resolve().parents[1]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def where_to_add() -> ModuleType:
    return load_script("where_to_add")


@pytest.mark.heavy
def test_no_test_module_imports_another() -> None:
    imports = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in imported(node)
        if any(part.startswith("test_") for part in name.split(".")) and name.startswith("tests.")
    ]
    assert imports == []


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


@pytest.mark.heavy
def test_tests_scripts_and_documents_use_names_that_are_there() -> None:
    stale_names = load_script("stale_names")
    assert [fault for path in stale_names.files() for fault in stale_names.stale(path)] == []


def test_a_name_that_is_gone_is_found_in_code_and_in_text() -> None:
    code = """
from HANG import find
from HANG.find import nobody
find.nothing(monkeypatch, "HANG.find.missing")
find.sentence("HANG.find.sentence")
""".replace("HANG", ".".join(("aorta", "hang")))
    faults = load_script("stale_names").stale_in_tree(ast.parse(code), "a.py", 0)
    assert sorted(fault.rpartition(".")[2] for fault in faults) == ["missing", "nobody", "nothing"]


def test_the_map_names_files_that_exist(where_to_add: ModuleType) -> None:
    tasks = where_to_add.tasks((ROOT / "CONTRIBUTING.md").read_text())
    assert len(tasks) >= 10
    for task in tasks:
        assert task.paths, task.name
        for path in task.paths:
            assert (ROOT / path).exists(), f"{task.name}: {path}"


@pytest.mark.heavy
def test_grep_for_the_nearest_example_leads_to_the_files_of_the_map(where_to_add: ModuleType) -> None:
    """To one of them at least: the base class of a workload does not name the workloads."""
    for task in where_to_add.tasks((ROOT / "CONTRIBUTING.md").read_text()):
        held = where_to_add.files_holding(task.example)
        assert len(where_to_add.missed(task, held)) < len(task.paths), task.name


def test_modules_that_start_first_are_there() -> None:
    assert [name for name in FIRST if not (ROOT / "tests" / name).exists()] == []


def test_the_fast_tier_sees_processes_through_helpers() -> None:
    def by_helper() -> None:
        launch.run_ranks(print, 1)

    assert leaves_the_process([by_helper])
    assert not leaves_the_process([test_no_test_module_imports_another])


def test_no_concept_has_a_second_home(tmp_path: Path) -> None:
    homes = load_script("homes")
    assert homes.second_homes() == []
    assert [
        name for home in homes.HOMES for name in home.files if not (ROOT / "aorta" / name).is_file()
    ] == []
    (tmp_path / "other.py").write_text("settings = yaml.safe_load(text)\n")
    (second,) = homes.second_homes(tmp_path)
    assert (second.home.concept, second.place) == ("reader of YAML", "other.py:1")
