"""The shape of the code: python scripts/house.py [--json] [--names] [FOLDER, aorta by default]

Prints lines, files per folder, import circles (between modules of one package too), vague names per 1,000
bindings, public classes whose name stands in several files, length of functions. Compare two states by
running it on both.
"""

import argparse
import ast
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

# Pronouns, prepositions, determiners and bare participles: as names they say nothing of what they hold.
WORDS = """
about above after against all_ among another any_ anything apart as_ asked at before below beside
besides both by came done each either else_ every everything for_ found from_ given gone had has_
held her here hers him his how in_ into it its kept known last_one left_one made more most much
neither nobody none nothing now of off on one ones other others out_of own rest said same seen
several shown so_far some somebody something such taken that their theirs them then there these they
thing things this those thus to to_be told toward under until upon us used wanted we were what
whatever when where whether which whichever who whoever whole whom whose why with_ within without
"""
VAGUE = frozenset(WORDS.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="aorta", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--names", action="store_true", help="list each vague name with file and line")
    options = parser.parse_args()
    modules = parse(options.folder)
    if options.names:
        for path, line, name in vague_bindings(modules):
            print(f"{path}:{line}: {name}")
        return
    shape = measure(options.folder, modules)
    if options.json:
        print(json.dumps(shape, indent=1))
    else:
        for key, value in shape.items():
            print(f"{key:32} {value}")


def parse(folder: Path) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


def measure(folder: Path, modules: dict[Path, ast.Module]) -> dict[str, object]:
    lines = {path: len(path.read_text().splitlines()) for path in modules}
    lengths = sorted(function_lengths(modules))
    bindings = sum(1 for tree in modules.values() for _ in names_bound(tree))
    vague = len(vague_bindings(modules))
    classes = class_files(modules)
    repeated = {name: len(paths) for name, paths in classes.items() if len(paths) > 1}
    per_folder = Counter(str(path.parent) for path in modules if path.name != "__init__.py")
    edges = imports(folder, modules)
    return {
        "lines": sum(lines.values()),
        "files": len(modules),
        "longest_file": max((count, str(path)) for path, count in lines.items()),
        "folders_over_15_files": {name: count for name, count in per_folder.most_common() if count > 15},
        "import_circles": circles(edges),
        "bindings": bindings,
        "vague_names": vague,
        "vague_names_per_1000": round(1000 * vague / bindings, 1),
        "public_classes": len(classes),
        "class_names_in_several_files": dict(sorted(repeated.items())),
        "class_names_in_several_files_pct": round(100 * len(repeated) / len(classes), 1),
        "functions": len(lengths),
        "function_lines_median": statistics.median(lengths),
        "function_lines_p90": lengths[int(0.9 * len(lengths))],
        "function_lines_max": lengths[-1],
        "modules_imported_once": sum(1 for count in used_by(edges).values() if count == 1),
    }


def names_bound(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a module binds: variables, arguments, functions, classes; import aliases are left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def vague_bindings(modules: dict[Path, ast.Module]) -> list[tuple[str, int, str]]:
    return [
        (str(path), line, name)
        for path, tree in modules.items()
        for name, line in names_bound(tree)
        if name.strip("_") in VAGUE or name in VAGUE
    ]


def function_lengths(modules: dict[Path, ast.Module]) -> list[int]:
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def class_files(modules: dict[Path, ast.Module]) -> dict[str, set[Path]]:
    files: dict[str, set[Path]] = defaultdict(set)
    for path, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].add(path)
    return files


def imports(folder: Path, modules: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Modules that each module imports when it is loaded or in a function, types alone left out."""
    names = {".".join(path.relative_to(folder.parent).with_suffix("").parts): path for path in modules}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    edges: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in without_type_checking(modules[path]):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [target if target in names else node.module for target in inner]
            else:
                continue
            edges[name].update(target for target in targets if target in names and target != name)
    return edges


def without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from without_type_checking(node)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected groups of more than one module, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in edges[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for name in edges:
        if name not in index:
            visit(name)
    return groups


def used_by(edges: dict[str, set[str]]) -> Counter[str]:
    return Counter(target for targets in edges.values() for target in targets)


if __name__ == "__main__":
    main()
