"""Documented commands exist with their options, links lead somewhere; the slow part types the commands."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from aorta.cli import main
from scripts import readme_blocks

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:srun )?(aorta [a-z-].*)")


def commands() -> Iterator[str]:
    """Lines of code that begin with aorta, without their comments."""
    for page in PAGES:
        fenced = False
        for line in page.read_text().replace("\\\n", " ").splitlines():
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


@pytest.mark.heavy
@pytest.mark.parametrize("script", ["settings_page", "api_page"])
def test_generated_pages_are_current(script: str) -> None:
    path = ROOT / "scripts" / f"{script}.py"
    spec = importlib.util.spec_from_file_location(script, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), f"run python scripts/{script}.py"


def test_every_page_is_in_the_navigation() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages == set(re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))


def test_every_block_of_the_readme_is_read() -> None:
    """scripts/readme_blocks.py types them: all in the workflow `packages`, and below with --slow."""
    text = (ROOT / "README.md").read_text()
    blocks = list(readme_blocks.blocks(ROOT / "README.md"))
    assert len(blocks) == text.count("```bash\n") > 1
    assert "```console" not in text  # nothing that looks like a command and is not typed
    assert blocks[0].text.startswith("bash scripts/demo.sh")


def test_the_tutorial_is_typed_too() -> None:
    assert len(list(readme_blocks.blocks(ROOT / "docs" / "tutorial.md"))) > 3


def test_pages_point_nowhere_outside_of_the_repository() -> None:
    """What a page tells to open or to read comes with the checkout."""
    outside = [
        f"{page.name}: {line}"
        for page in PAGES
        for line in page.read_text().splitlines()
        if "../shared" in line
    ]
    assert not outside


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings_that_exist(page: Path) -> None:
    for target in LINK.findall(without_code(page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        name, _, heading = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        assert not heading or heading in headings(linked), target


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them of plain words."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.processes
def test_a_block_that_fails_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "a page.md"
    page.write_text(
        '```bash\necho "$PWD" >here\n```\n\n```bash\n# gpus=99\nfalse\n```\n'
        "```bash\ntrue | false\n```\n```bash\ntouch never\n```\n"
    )
    typed = readme_blocks.type_all(list(readme_blocks.blocks(page)), tmp_path, dict(os.environ))
    assert typed == 1
    said = capsys.readouterr().out
    assert "a page.md:1      exit status 0" in said
    assert "a page.md:5      left out: needs 99 GPUs" in said
    assert "a page.md:9      exit status 1" in said
    assert (tmp_path / "here").read_text() == f"{tmp_path}\n"
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_blocks_are_typed_literally() -> None:
    """In a copy of the checkout and a new environment, with spaces in paths; packages of this one."""
    command = [sys.executable, str(ROOT / "scripts" / "readme_blocks.py"), "--light"]
    subprocess.run([*command, "README.md", "docs/tutorial.md"], check=True)
