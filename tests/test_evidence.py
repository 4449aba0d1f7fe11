"""docs/evidence.md: one row a claim, commands that exist, a row for each figure that other pages state."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "docs" / "evidence.md"
CLAIM = re.compile(r"^\| (?!claim |what )(.*) \|$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`( at (?:[0-9a-f]{7,8}|the root)\b)?")
NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")
CITED = re.compile(r"\]\((?:docs/)?evidence\.md")


def claims() -> list[list[str]]:
    text = EVIDENCE.read_text().partition("## Not run")[0]
    return [row.split(" | ") for row in CLAIM.findall(text)]


def figures(text: str) -> set[str]:
    """Numbers as claims state them: no code, no links, no dates, no versions of software, no small counts."""
    text = re.sub(
        r"`[^`\n]*`|\]\([^)]*\)|20\d\d-\d\d-\d\d|(?:torch|NCCL|driver|Python|CUDA|CUPTI) [\d.]+(?:\+\w+)?",
        " ",
        text,
    )
    return {found for found in NUMBER.findall(text) if "." in found or len(found) > 1}


def test_a_claim_has_a_figure_a_device_a_date_and_a_command() -> None:
    for row in claims():
        assert len(row) == 5, row
        assert all(row), row
        assert re.fullmatch(r"1[12]-\d\d", row[3]), row


def test_no_claim_has_two_rows() -> None:
    names = [row[0] for row in claims()]
    assert not {name for name in names if names.count(name) > 1}
    assert not [name for name in names if name.startswith("the same again")]


def test_commands_and_tables_of_claims_exist() -> None:
    """But for those that a commit is named for: they went with a later one."""
    missing = []
    for row in claims():
        for code, commit in CODE.findall(row[4]):
            if commit:
                continue
            words = [word for word in code.split() if "=" not in word]
            if words[0] in ("pytest", "bash", "python") and not code.startswith("python -m"):
                paths = [ROOT / word for word in words[1:] if "/" in word]
            elif words[0].endswith((".py", ".sh")) and not words[0].startswith(("aorta/", "tests/")):
                paths = [ROOT / "benchmarks" / words[0]]
            else:
                paths = []
            paths += [ROOT / word for word in words if word.startswith(("aorta/", "tests/", "benchmarks/"))]
            missing += [f"{row[0]}: {path}" for path in paths if not path.exists()]
            if words[0].endswith(".py"):
                missing += [
                    f"{row[0]}: {flag}"
                    for flag in words
                    if flag[:2] == "--" and flag not in options(words[0])
                ]
        names = re.findall(r"\w+\.(?:csv|json)\b", re.sub(r"`[^`]*`", "", row[4]))
        missing += [
            f"{row[0]}: {name}" for name in names if not (ROOT / "benchmarks" / "results" / name).exists()
        ]
    assert not missing


def options(harness: str) -> str:
    """Where a harness and what it takes from harness.py name their options."""
    folder = (ROOT / "benchmarks" / harness).parent
    beside = folder.glob("*.py") if folder.exists() else []
    return "".join(path.read_text() for path in [*beside, ROOT / "benchmarks" / "harness.py"])


def cited() -> list[tuple[str, str]]:
    """Passages that give their figures to the evidence: README's cost and limits, and what links to it."""
    readme = (ROOT / "README.md").read_text()
    found = [("README.md", readme[readme.index("## Cost") : readme.index("## Versions")])]
    for page in sorted((ROOT / "docs").glob("*.md")):
        parts = re.split(r"\n\n+", page.read_text())
        for at, part in enumerate(parts):
            if page != EVIDENCE and CITED.search(part):
                # tests/programs/test_measured.py compares the table of programs.md with its file
                table = [
                    part
                    for part in parts[at + 1 : at + 3]
                    if part.startswith("|") and page.name != "programs.md"
                ]
                found.append((page.name, "\n".join([part, *table])))
    return found


@pytest.mark.parametrize(("page", "text"), cited(), ids=[page for page, _ in cited()])
def test_figures_of_other_pages_have_a_row(page: str, text: str) -> None:
    """As it stands there, or rounded."""
    known = figures(EVIDENCE.read_text())
    missing = [
        figure
        for figure in figures(text) - known
        if not any(f"{float(longer.replace(',', '')):.{decimals(figure)}f}" == figure for longer in known)
    ]
    assert not missing, page


def decimals(figure: str) -> int:
    return len(figure.partition(".")[2])
