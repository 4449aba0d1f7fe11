"""Makes docs/pictures from the runs in docs/example: the report's page, light and dark, and the terminal.

    python scripts/pictures.py [--output docs/pictures]

Needs Chromium (Debian: apt-get install chromium).
"""

import argparse
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from aorta.page.parts import DARK  # noqa: E402
from aorta.page.write import make_report  # noqa: E402
from tests.chromium import ABSENT, Browser, Page, browser, executable  # noqa: E402

EXAMPLE = "docs/example"
WIDTH = 1180
SCALE = 1.5
FRAME = 24
TERMINAL_COLUMNS = 120
# rich's frame loads fonts from the network and draws the buttons of a window.
TERMINAL_SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
text {{ font: {char_height}px/{line_height}px "DejaVu Sans Mono", Menlo, Consolas, monospace; }}
{styles}
</style>
<defs>{lines}</defs>
<rect fill="BACKGROUND" width="{width}" height="{height}" rx="8"/>
<g transform="translate({terminal_x}, 24)">{backgrounds}{matrix}</g></svg>
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make docs/pictures from docs/example.")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures")
    output: Path = parser.parse_args().output
    if executable() is None:
        print(f"pictures: {ABSENT}", file=sys.stderr)
        return 2
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, browser(Path(folder)) as running:
        page_file = Path(folder) / "report.html"
        write_page(page_file)
        for theme in ("light", "dark"):
            picture_page(running, page_file.as_uri(), output, theme)
        picture_terminal(running, Path(folder), output)
    for path in sorted(output.glob("*.png")):
        print(f"wrote {path} ({path.stat().st_size / 1024:.0f} KiB)")
    return 0


def write_page(path: Path) -> None:
    from aorta.page.html import write_page

    names = ("fsdp", "ddp")
    write_page(path, make_report([ROOT / EXAMPLE / name for name in names], names, *names))


def picture_page(running: Browser, address: str, output: Path, theme: str) -> None:
    """report-<theme>.png: the first screen. timeline-<theme>.png: a step of both runs."""
    page = running.open(address, width=WIDTH, height=1000, dark=theme == "dark", scale=SCALE)
    bottom = bottom_of(page, "#changes table")
    page.screenshot(output / f"report-{theme}.png", (0, 0, WIDTH, bottom + 8))
    top, bottom = top_of(page, "#timeline"), bottom_of(page, "#timeline .canvas")
    page.screenshot(output / f"timeline-{theme}.png", (0, top, WIDTH, bottom - top + FRAME))
    page.close()


def picture_terminal(running: Browser, folder: Path, output: Path) -> None:
    """terminal.png: what the command prints for one run."""
    command = f"python analysis/overlap_report.py --log-dir {EXAMPLE}/ddp --label ddp --output reports/ddp"
    words = [word if word != "reports/ddp" else str(folder / "ddp") for word in command.split()]
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
    console = Console(
        record=True, width=TERMINAL_COLUMNS, file=StringIO(), force_terminal=True, highlight=False
    )
    console.print(Text.assemble(("$ ", "dim"), (command, "bold")))
    console.print()
    console.print(Text(done.stdout.replace(str(folder / "ddp"), "reports/ddp").rstrip()), soft_wrap=False)
    theme = TerminalTheme(rgb(DARK["panel"]), rgb(DARK["ink"]), [rgb(DARK["muted"])] * 8)
    drawing = folder / "terminal.html"
    svg = console.export_svg(
        theme=theme, code_format=TERMINAL_SVG.replace("BACKGROUND", DARK["panel"]), font_aspect_ratio=0.602
    )
    drawing.write_text(f'<!doctype html><meta charset="utf-8"><body style="margin:0">{svg}')
    page = running.open(drawing.as_uri(), width=WIDTH, height=800, scale=SCALE)
    page.call("Emulation.setDefaultBackgroundColorOverride", color={"r": 0, "g": 0, "b": 0, "a": 0})
    page.screenshot(output / "terminal.png", (0, 0, WIDTH, bottom_of(page, "svg")))
    page.close()


def rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def top_of(page: Page, selector: str) -> float:
    return float(page.js(f"document.querySelector('{selector}').getBoundingClientRect().top + scrollY"))


def bottom_of(page: Page, selector: str) -> float:
    return float(page.js(f"document.querySelector('{selector}').getBoundingClientRect().bottom + scrollY"))


if __name__ == "__main__":
    sys.exit(main())
