"""Types the command blocks of README.md, literally and in order, in a copy of this checkout.

    python scripts/readme_blocks.py [--folder "/tmp/a fresh machine"] [--light] [PAGE...]

The copy and a new virtual environment are in --folder (a temporary one with spaces in its name), whose Python
is the one that runs this. A block is what stands between ```bash and ```; `# gpus=2` in its first line says
that it needs as many GPUs, and it is left out where there are fewer. The environment is active, as after
`source .venv/bin/activate`.

--light: `pip install` takes the packages that this Python has, and installs aorta alone without the network.

Prints a line per block. Exit status 1 with the first block that fails.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUM_GPUS = re.compile(r"# gpus=(\d+)")
LIGHT = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
"""pip reads PIP_NO_BUILD_ISOLATION the other way round: 0 is no isolation."""


@dataclass(frozen=True)
class Block:
    """Commands that are typed together."""

    page: str
    line: int
    text: str
    num_gpus: int


def blocks(page: Path) -> Iterator[Block]:
    """The command blocks of a page, in order."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        needed = NUM_GPUS.match(match[1])
        yield Block(page.name, line, match[1], int(needed[1]) if needed else 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", nargs="*", default=["README.md"])
    parser.add_argument("--folder", type=Path, help="kept; its environment is used again if it is there")
    parser.add_argument("--light", action="store_true", help="take the packages that this Python has")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="a fresh machine ", ignore_cleanup_errors=True) as name:
        folder = (options.folder or Path(name)).absolute()
        copy = copied(folder / "a clone")
        environment = fresh_environment(folder / "an environment", options.light)
        return type_all([block for page in options.page for block in blocks(copy / page)], copy, environment)


def copied(copy: Path) -> Path:
    """The checkout as it would be cloned, with what is not committed yet."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, text=True).split("\0"):
        source, target = ROOT / name, copy / name
        if name and source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            target.chmod(source.stat().st_mode)
    return copy


def fresh_environment(venv: Path, light: bool) -> dict[str, str]:
    """The variables of a shell in which a new virtual environment is active."""
    if not (venv / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    if light:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (venv / "lib" / version / "site-packages" / "others.pth").write_text(sysconfig.get_path("purelib"))
        # The setuptools that venv brings would hide a newer one, which builds aorta.
        uninstall = [str(venv / "bin" / "python"), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"]
        subprocess.run(uninstall, check=True)
    removed = ("PYTHONPATH", "PYTHONHOME", "RANK", "WORLD_SIZE", "AORTA_RUN")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    places = [venv / "bin", *([Path(sys.executable).parent] if light else [])]  # torchrun comes with torch
    path = os.pathsep.join([*map(str, places), os.environ["PATH"]])
    return environment | {"VIRTUAL_ENV": str(venv), "PATH": path} | (LIGHT if light else {})


def type_all(chosen: list[Block], copy: Path, environment: dict[str, str]) -> int:
    """1 with the first block that fails, else 0."""
    num_gpus = 0
    if any(block.num_gpus for block in chosen):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False) if (
            any((Path(folder) / "nvidia-smi").exists() for folder in environment["PATH"].split(os.pathsep))
        ) else None  # fmt: skip
        num_gpus = 0 if listed is None else len(listed.stdout.splitlines())
    for block in chosen:
        place = f"{block.page}:{block.line}"
        if block.num_gpus > num_gpus:
            print(f"{place:16} left out: needs {block.num_gpus} GPUs, there are {num_gpus}", flush=True)
            continue
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as log:
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            status = subprocess.run(command, cwd=copy, env=environment, stdout=log, stderr=log).returncode
            print(f"{place:16} exit status {status} after {time.monotonic() - began:.0f} s", flush=True)
            if status != 0:
                log.seek(0)
                print(block.text, "".join(log.readlines()[-40:]), sep="\n", flush=True)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
