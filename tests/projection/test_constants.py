"""Every number that hardware and projection read from a file carries its source."""

from pathlib import Path

import pytest

from aorta.config.yaml_files import read_yaml
from aorta.errors import ConfigError
from aorta.hardware.part import load_hardware
from aorta.projection import constants as module
from aorta.projection.constants import constants
from aorta.projection.interval import WIDTHS
from aorta.projection.prices import Factors, factors_of

PACKAGE = Path(module.__file__).resolve().parents[1]
FILES = sorted([*(PACKAGE / "hardware").rglob("*.yaml"), *(PACKAGE / "projection").rglob("*.yaml")])


def unsourced(node, sources, path="", covered=False):
    """Dotted names of numbers with neither a source of their own nor one of the mapping that holds them."""
    if isinstance(node, dict):
        covered = covered or bool(str(node.get("source") or "").strip())
        names = []
        for name, item in node.items():
            if name == "sources" and not path:
                continue
            # The file's source says what a framework is; each of its rules needs one of its own.
            inside = covered and not (name == "rules" and not path)
            names += unsourced(item, sources, f"{path}.{name}" if path else name, inside)
        return names
    if isinstance(node, list):
        if len(node) == 2 and isinstance(node[1], str) and node[1] in sources:
            return []
        return [
            name
            for number, item in enumerate(node)
            for name in unsourced(item, sources, f"{path}[{number}]", covered)
        ]
    is_number = isinstance(node, int | float) and not isinstance(node, bool)
    return [path] if is_number and not covered else []


def test_every_number_in_every_file_has_a_source():
    assert len(FILES) > 270
    missing = {}
    for path in FILES:
        document = read_yaml(path)
        names = {"derived"} | set(document.get("sources", {}))
        if path.parent == PACKAGE / "hardware" / "parts":
            vendor = read_yaml(path.parent / "vendor" / f"{document['vendor']}.yaml")
            names |= set(vendor["sources"])
        for source in document.get("sources", {}).values():
            assert source["what"], path
            assert source["date"], path
        found = unsourced(document, names)
        if found:
            missing[path.name] = found
    assert not missing


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        pytest.param({"a": {"b": 3}}, ["a.b"], id="plain"),
        pytest.param({"a": [3, "hearsay"]}, ["a[0]"], id="unknown-source"),
        pytest.param({"a": [3, "sheet"]}, [], id="sourced"),
        pytest.param(
            {"source": "s", "rules": [{"set": {"slowdown": 1.1}, "source": ""}]},
            ["rules[0].set.slowdown"],
            id="rule-without",
        ),
        pytest.param({"rules": [{"set": {"slowdown": 1.1}, "source": "rows x"}]}, [], id="rule-with"),
    ],
)
def test_the_walk_finds_what_lacks_one(document, expected):
    assert unsourced(document, {"sheet"}) == expected


def test_constants_say_how_they_came_about():
    ways = ("measured", "derived", "fitted", "assumed", "as left_out")
    _, sources = module._sections()
    assert all(source.what.startswith(ways) for source in sources.values())
    names = set(sources)
    assert {f"widths.{name}" for name in type(WIDTHS).__struct_fields__} <= names
    of_parts = {"gemm", "fp8_gemm", "fp4_gemm"}  # these are in the hardware's files
    assert {f"factors.any.{name}" for name in set(Factors.__struct_fields__) - of_parts} <= names


def test_a_vendor_goes_before_what_holds_for_all():
    assert factors_of(load_hardware("h200")).contention_compute == 1.38
    assert factors_of(load_hardware("mi300x")).contention_compute == 1.33


def test_a_number_without_a_source_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "constants.yaml"
    path.write_text("widths: {base: [0.1, hearsay]}\nsources: {}\n")
    monkeypatch.setattr(module, "PATH", path)
    module._sections.cache_clear()
    try:
        with pytest.raises(ConfigError, match="hearsay"):
            constants(dict, "widths")
    finally:
        module._sections.cache_clear()
