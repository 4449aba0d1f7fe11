"""Published training programs, how each is started, and how many steps it then has (programs.yaml)."""

import shlex
import subprocess
from pathlib import Path

import msgspec

HERE = Path(__file__).resolve().parent


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program of another project, as it was published.

    Its number of steps follows from its arguments and data, never from aorta.
    """

    source: str
    """Folder of the checkout."""
    folder: str
    """That it is started in, below the checkout."""
    command: str
    """Words behind python or torchrun; {data} is the folder of data made here."""
    steps: int
    """Optimizer steps of each rank."""
    ranks: int = 2
    """That train."""
    torchrun: bool = True
    devices: bool = False
    """Asks for GPUs: the witness shows it CPUs in their place."""
    outside: bool = False
    """Collectives between the optimizer's calls belong to no step (evaluation), or to the next."""
    options: list[str] = []
    """Options of `aorta run`."""
    links: dict[str, str] = {}
    """Names in the folder that stand for data made here."""
    variables: dict[str, str] = {}

    def words(self, data: Path) -> list[str]:
        """The command, word by word. data: folder of the data."""
        return [word.format(data=data) for word in shlex.split(self.command)]


PROGRAMS = msgspec.yaml.decode((HERE / "programs.yaml").read_bytes(), type=dict[str, Program])


def prepare(folder: Path, python: str) -> None:
    """Make the data and the tiny models that the programs read."""
    data = folder / "data"
    if not (data / "ready").exists():
        data.mkdir(parents=True, exist_ok=True)
        subprocess.run([python, str(HERE / "data.py"), str(data)], check=True)
        (data / "ready").touch()
