"""Writes docs/settings.md from the structs of aorta.config: `python scripts/settings_page.py`."""

import argparse
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

import ast  # noqa: E402

import msgspec  # noqa: E402

from aorta.config.structs import Config  # noqa: E402

PAGE = ROOT / "docs" / "settings.md"
HEAD = """# Settings

Settings of `aorta train`: in a YAML file by section, or as `section.key=value` behind the command. The
sections `hang` and `profiling` are also the fields of these options of `aorta.instrument`. Made from the
code by `scripts/settings_page.py`.
"""


def page() -> str:
    """The text of docs/settings.md."""
    parts = [HEAD]
    for section in msgspec.structs.fields(Config):
        parts.append(f"\n## {section.name}\n\n| setting | default | meaning |\n|---|---|---|\n")
        meanings = docstrings(section.type)
        for field in msgspec.structs.fields(section.type):
            meaning = meanings.get(field.name, "").replace("|", "\\|")
            parts.append(f"| `{field.name}` | `{default(field)}` | {meaning} |\n")
    return "".join(parts)


def default(field: Any) -> str:
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def docstrings(struct: type) -> dict[str, str]:
    """The text below each field, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text.value, ast.Constant)
            texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
