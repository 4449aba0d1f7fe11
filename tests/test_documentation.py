"""What README.md and docs/ tell a user to type is what the commands take; the slow part types it."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from aorta.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:srun )?(aorta [a-z-].*)")
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands() -> Iterator[str]:
    """Lines of code that begin with aorta, without their comments."""
    for page in PAGES:
        fenced = False
        for line in page.read_text().splitlines():
            fenced ^= line.startswith("```")
            command = COMMAND.fullmatch(line.strip())
            if command is not None and (fenced or line.startswith("    ")) and "aorta: " not in line:
                yield command[1].partition("  #")[0].strip()


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_documented_commands_exist_with_their_options(line: str) -> None:
    words = shlex.split(line)[1:]
    group: click.Command = main
    while isinstance(group, click.Group):
        found = group.get_command(click.Context(group), words[0])
        assert found is not None, f"there is no command {words[0]}"
        group, words = found, words[1:]
    context = click.Context(group, **group.context_settings, resilient_parsing=True)
    context.allow_interspersed_args = group.context_settings.get("allow_interspersed_args", True)
    group.make_parser(context).parse_args(list(words))  # raises for an option that is not there


def test_the_page_of_settings_is_made_from_the_structs() -> None:
    path = ROOT / "scripts" / "settings_page.py"
    spec = importlib.util.spec_from_file_location("settings_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "settings.md").read_text() == module.page(), "run scripts/settings_page.py"


def test_every_page_is_in_the_navigation() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages == set(re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_blocks_are_typed_literally(page: str, tmp_path: Path) -> None:
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / "examples", folder / "examples")
    blocks = [block for block in BLOCK.findall((ROOT / page).read_text()) if "pip install" not in block]
    assert blocks
    script = "\n".join(blocks).replace("aorta ", f"{shlex.quote(sys.executable)} -m aorta ")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run(["bash", "-euc", script], cwd=folder, env=environment, check=True)
