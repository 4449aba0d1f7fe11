"""Rules about the tests themselves, and maps of the package that stay true."""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.dist import launch
from tests.tiers import FIRST, leaves_the_process

ROOT = Path(__file__).resolve().parents[1]
MAPS = (("CONTRIBUTING.md", "folder"), ("docs/design.md", "folder"))
"""Documents with a table of the package's folders, and the header of its first column."""
PATH = re.compile(r"`((?:aorta|tests|scripts|benchmarks|docs|examples)/[\w./-]*\w)`")
LISTED = re.compile(r"\b([a-z_]+)\.py\b|^([a-z_]+)/?  +\S", re.MULTILINE)
"""A file in the docstring of its folder."""
IMPORTED_TEST = re.compile(r"^\s*(?:from|import) tests\b[^\n(]*(?:\([^)]*)?\btest_", re.MULTILINE)
"""What to import a test module takes: few files need a syntax tree."""
FILE = re.compile(r"`([\w./-]+\.(?:py|c|sh|yaml|html))`")
WRITTEN = {"report.html"}
"""Files that a run leaves, not the repository."""


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_no_test_module_imports_another() -> None:
    imports = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "tests").rglob("*.py")
        if IMPORTED_TEST.search(text := path.read_text())
        for node in ast.walk(ast.parse(text))
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


@pytest.mark.parametrize(("document", "column"), MAPS)
def test_a_map_names_every_folder_of_the_package(document: str, column: str) -> None:
    folders = {path.parent.name for path in (ROOT / "aorta").glob("*/*.py")}
    assert sorted(folders - named_folders(document, column)) == []


@pytest.mark.parametrize(("document", "column"), MAPS)
def test_what_a_map_names_exists(document: str, column: str) -> None:
    named = named_folders(document, column)
    assert len(named) > 20
    there = {path.relative_to(ROOT / "aorta").as_posix() for path in (ROOT / "aorta").rglob("*")}
    there |= {path.rpartition("/")[2] for path in there}  # a folder's parts are named without it
    assert sorted(named - there) == []
    text = (ROOT / document).read_text()
    assert [path for path in PATH.findall(text) if not (ROOT / path).exists()] == []
    files = [f"/{path.relative_to(ROOT).as_posix()}" for path in paths_of_the_repository()]
    gone = [name for name in FILE.findall(text) if not any(file.endswith(f"/{name}") for file in files)]
    assert sorted(set(gone) - WRITTEN) == []


def test_files_that_a_folder_lists_are_there() -> None:
    listed = {
        (path.parent, "".join(names))
        for path in (ROOT / "aorta").rglob("__init__.py")
        for names in LISTED.findall(ast.get_docstring(ast.parse(path.read_text())) or "")
    }
    assert len(listed) > 80
    gone = [(folder.name, name) for folder, name in listed if not [*folder.rglob(f"{name}.py")]]
    assert [(folder, name) for folder, name in gone if not [*(ROOT / "aorta" / folder).glob(name)]] == []


def paths_of_the_repository() -> list[Path]:
    folders = ("aorta", "tests", "scripts", "benchmarks", "docs")
    return [path for folder in folders for path in (ROOT / folder).rglob("*.*")]


def named_folders(document: str, column: str) -> set[str]:
    """Names in the first column of the table whose header begins with `column`, relative to aorta/."""
    table = (ROOT / document).read_text().partition(f"| {column} |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    names = [name.removeprefix("aorta/") for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return {name if name.endswith(".py") else name.replace(".", "/") for name in names}


def test_modules_that_start_first_are_there() -> None:
    assert [name for name in FIRST if not (ROOT / "tests" / name).exists()] == []


def test_the_fast_tier_sees_processes_through_helpers() -> None:
    def by_helper() -> None:
        launch.run_ranks(print, 1)

    assert leaves_the_process([by_helper])
    assert not leaves_the_process([test_no_test_module_imports_another])
