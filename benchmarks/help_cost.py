"""CPU seconds of `aorta COMMAND --help` for every command, those within groups too.

    python benchmarks/help_cost.py [--rounds 3]

A table of medians: one process per command and round, all commands in turn.
"""

import argparse
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator

import click

from aorta.cli import main as aorta


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    commands = list(words_of(aorta))
    times: dict[tuple[str, ...], list[float]] = {words: [] for words in commands}
    for _ in range(rounds):
        for words in commands:
            times[words].append(cpu_s([sys.executable, "-m", "aorta", *words, "--help"]))
    for words, values in times.items():
        print(f"{' '.join(words) or 'aorta':25} {statistics.median(values):.2f}")


def words_of(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from words_of(inner, (*words, name))


def cpu_s(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
