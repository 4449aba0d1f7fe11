"""Looks for `something.<section>.<key>` or `<key>` on a local name of the section, outside aorta/config."""

import ast
from functools import cache
from pathlib import Path

import msgspec
import pytest

from aorta.config.structs import Config

SECTIONS = {field.name: field.type for field in msgspec.structs.fields(Config)}
SETTINGS = [(section, key) for section, struct in SECTIONS.items() for key in struct.__struct_fields__]

# The section's name is not enough to tell: these names hold a section in the modules that read it.
LOCAL_NAMES = {
    "profiling": {"settings", "_settings", "profiling"},
    "optimizer": {"settings", "optimizer"},
    "compile": {"config", "compile"},
    "parallel": {"parallel", "layout"},  # dp, tp and ep are read resolved
    "model": {"config", "model"},
}
LOOP = ["aorta/training", "aorta/record", "aorta/attach", "aorta/merge", "aorta/hang"]
PLACES = {
    "profiling": ["aorta/record", "aorta/attach", "aorta/merge"],
    "model": ["aorta/training"],
    "compile": ["aorta/training"],
}


def attributes_read(section: str) -> set[str]:
    names = LOCAL_NAMES.get(section, {section})
    return {
        attribute
        for folder in PLACES.get(section, LOOP)
        for path in Path(folder).rglob("*.py")
        for name, attribute in attributes_of(path)
        if name in names | {section}
    }


@cache
def attributes_of(path: Path) -> set[tuple[str | None, str]]:
    """Names and their attributes; what all sections look through is read once."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {(last_name(node.value), node.attr) for node in nodes if isinstance(node, ast.Attribute)}


def last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


@pytest.mark.heavy
@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_read_by_some_module(section):
    unread = set(SECTIONS[section].__struct_fields__) - attributes_read(section)
    assert not unread, f"{section}: nothing reads {sorted(unread)}"


def test_every_setting_has_a_docstring():
    tree = ast.parse(Path("aorta/config/structs.py").read_text())
    for struct in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name != "Config"):
        for field, following in zip(struct.body, [*struct.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                assert isinstance(following, ast.Expr), ast.unparse(field)
