"""Names of this repository that tests, scripts and documents use but nobody defines.

Tests are not type-checked, and some names stand in text: source that a test hands to another process, what it
patches, `python -m` in a document. After a rename these are found here, without importing anything.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("aorta", "tests")
FOLDERS = ("docs", "examples", "scripts", "tests")
"""What mypy does not read."""
DOTTED = re.compile(r"(?:aorta|tests)(?:\.\w+)+")
MODULE_OPTION = re.compile(r"python3? -m (aorta(?:\.\w+)*)")


def main() -> int:
    faults = [fault for path in files() for fault in stale(path)]
    print(*faults, sep="\n")
    return 1 if faults else 0


def files() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".sh") and "__pycache__" not in path.parts:
                yield path


def stale(path: Path) -> Iterator[str]:
    text = path.read_text()
    place = str(path.relative_to(ROOT))
    if path.suffix == ".py":
        yield from stale_in_tree(ast.parse(text), place, 0)
    for match in MODULE_OPTION.finditer(text):
        if module_path(match[1]) is None:
            yield f"{place}: there is no {match[1]}"


def stale_in_tree(tree: ast.AST, place: str, first_line: int) -> Iterator[str]:
    modules: dict[str, str] = {}
    nodes = [*ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and is_own(node.module):
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if alias.name != "*" and not exists(name):
                    yield f"{place}:{first_line + node.lineno}: there is no {name}"
                elif module_path(name) is not None:
                    modules[alias.asname or alias.name] = name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_own(alias.name) and module_path(alias.name) is None:
                    yield f"{place}:{first_line + node.lineno}: there is no {alias.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from stale_in_text(node.value, place, first_line + node.lineno)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            name = f"{modules[node.value.id]}.{node.attr}"
            if not node.attr.startswith("__") and not exists(name) and not rebound(tree, node.value.id):
                yield f"{place}:{first_line + node.lineno}: there is no {name}"


def stale_in_text(text: str, place: str, line: int) -> Iterator[str]:
    """A dotted name by itself, or source code."""
    if DOTTED.fullmatch(text):
        is_module = module_path(".".join(text.split(".")[:2])) is not None  # else a key, a file, a logger
        if is_module and not exists(text):
            yield f"{place}:{line}: there is no {text}"
    elif "\n" in text and "import" in text and "aorta" in text:
        try:
            tree = ast.parse(dedent(text))
        except SyntaxError:
            return
        yield from stale_in_tree(tree, place, line - 1)


def is_own(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in PACKAGES


def rebound(tree: ast.AST, name: str) -> bool:
    """The name is an argument or a variable somewhere too, so that an attribute of it may be another's."""
    return any(
        (isinstance(node, ast.arg) and node.arg == name)
        or (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        for node in ast.walk(tree)
    )


@cache
def exists(dotted: str) -> bool:
    """A module, or a name that is bound in one; what follows such a name is not looked at."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        if module_path(".".join(parts[:end])) is not None:
            module = ".".join(parts[:end])
            return end == len(parts) or is_defined(parts[end], module) or parts[end] in names_in(module)
    return False


def is_defined(name: str, module: str) -> bool:
    """At the beginning of a line: most are, and to find that out needs no syntax tree."""
    return (
        re.search(rf"^(?:(?:async )?def |class )?{name}\b(?:\(|\[|:| =)", text_of(module), re.M) is not None
    )


@cache
def text_of(module: str) -> str:
    path = module_path(module)
    return path.read_text() if path is not None and path.is_file() else ""


@cache
def module_path(dotted: str) -> Path | None:
    path = ROOT.joinpath(*dotted.split("."))
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    if path.is_dir():
        return path / "__init__.py"
    return None


@cache
def names_in(module: str) -> frozenset[str]:
    """Names that a module binds anywhere in it, and the modules beside its __init__."""
    path = module_path(module)
    assert path is not None
    names = {"__path__", "__file__", "__name__", "__doc__", "__main__"}
    if path.name == "__init__.py":
        names |= {entry.stem for entry in path.parent.iterdir()}
    for node in ast.walk(ast.parse(text_of(module))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # of __getattr__ and other tables of names
    return frozenset(names)


if __name__ == "__main__":
    sys.exit(main())
