"""Damaged and hostile traces: bytes, JSON values, rows of databases, and packed files."""

import gzip
import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aorta.account.load.traces.open import load_traces
from aorta.errors import AortaError
from aorta.traces.steps import Reading
from tests.traces.trace_writers import WRITERS, kineto, write_tar

VALUES: tuple[Any, ...] = (
    None, 0, -1, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**40, 1.5, -1e300, 1e308, 0.1, "", "x",
    "7", "../../x", "<script>", "\ud800", "\0", [], [1], {}, {"a": 1}, True,
    "ProfilerStep#99999999999999999999", "ncclDevKernel_AllReduce" * 500, "[0, 1, ..., 7]",
)  # fmt: skip
INSERTS = (
    b"null",
    b"[",
    b"}",
    b'"',
    b"1e999",
    b"-",
    b"\n",
    b"\xff",
    b"{}",
    b",",
    b"\0" * 8,
    b"NaN",
    b"\\ud800",
)


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out))
        match rng.randrange(5):
            case 0:
                del out[at : at + rng.randint(1, 40)]
            case 1:
                out[at] = rng.randrange(256)
            case 2:
                out[at:at] = rng.choice(INSERTS)
            case 3:
                del out[at:]
            case 4:
                out[at:at] = out[: rng.randint(1, 200)]
        if not out:
            break
    return bytes(out)


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """Some values replaced, removed or doubled."""
    body = json.loads(data)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            places.append((node, key))
            walk(node[key])

    walk(body)
    for node, key in rng.sample(places, min(len(places), rng.randint(1, 4))):
        try:
            match rng.randrange(4):
                case 0:
                    del node[key]
                case 1 if isinstance(node, list):
                    node.append(node[key])
                case _:
                    node[key] = rng.choice(VALUES)
        except (KeyError, IndexError):
            pass  # removed with its parent
    return json.dumps(body).encode("utf-8", "surrogatepass")


def mutate_database(path: Path, rng: random.Random) -> None:
    """Some cells replaced, columns renamed, tables or views dropped."""
    db = sqlite3.connect(path)
    try:
        names = [
            (name, kind)
            for name, kind in db.execute("SELECT name, type FROM sqlite_master WHERE sql NOT NULL")
        ]
        for _ in range(rng.randint(1, 4)):
            name, kind = rng.choice(names)
            columns = [row[1] for row in db.execute(f'PRAGMA table_info("{name}")')]
            if not columns:
                continue
            column = rng.choice(columns)
            match rng.randrange(5):
                case 0:
                    db.execute(f'DROP {kind.upper()} "{name}"')
                case 1 if kind == "table":
                    db.execute(f'ALTER TABLE "{name}" RENAME COLUMN "{column}" TO "was_{column}"')
                case 2 if kind == "table":
                    db.execute(f'INSERT INTO "{name}" SELECT * FROM "{name}"')
                case _ if kind == "table":
                    value = rng.choice(VALUES)
                    if isinstance(value, int) and not -(2**63) <= value < 2**63:
                        value = float(value)
                    if isinstance(value, (list, dict)):
                        value = json.dumps(value).encode()
                    if isinstance(value, str):
                        value = value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
                    db.execute(
                        f'UPDATE "{name}" SET "{column}" = ? WHERE rowid % ? = 0', (value, rng.randint(1, 3))
                    )
        db.commit()
    except sqlite3.Error:
        pass  # a change that SQLite refuses
    finally:
        db.close()


class Mutations:
    """An endless supply of damaged folders, one format after another."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._rng = random.Random(seed)
        self._folder = folder
        self._good: dict[str, Path] = {}
        for name, (file, write) in WRITERS.items():
            good = folder / "good" / name
            good.mkdir(parents=True)
            write(good / file)
            self._good[name] = good

    def make(self, number: int) -> tuple[str, Path]:
        """The format, and the folder that holds the damaged trace."""
        rng = self._rng
        name = list(self._good)[number % len(self._good)]
        folder = self._folder / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._good[name], folder)
        path = rng.choice(sorted(folder.iterdir()))
        data = path.read_bytes()
        if path.suffix in (".db", ".sqlite") and rng.random() < 0.7:
            mutate_database(path, rng)
        elif path.suffix == ".json" and rng.random() < 0.6:
            path.write_bytes(mutated_json(data, rng))
        elif name == "kineto-tar" and rng.random() < 0.6:
            write_tar(path, [mutated_json(kineto(0, 2), rng), mutated_json(kineto(1, 2), rng)])
        elif path.suffix == ".gz" and rng.random() < 0.6:
            path.write_bytes(gzip.compress(mutated_bytes(gzip.decompress(data), rng), 1))
        else:
            path.write_bytes(mutated_bytes(data, rng))
        return name, folder


def outcome(load: Callable[[], object]) -> str:
    """'read', or the one line; AssertionError for anything else."""
    try:
        load()
    except AortaError as error:
        line = str(error)
        assert "\n" not in line, line[:3000]
        assert len(line) < 2000, line[:3000]
        return line
    return "read"


def load(folder: Path) -> object:
    """All of what a report does with traces."""
    run = load_traces(folder, "x", reading=Reading())
    return [list(run.records(rank)) for rank in run.ranks]
