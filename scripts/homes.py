"""Concepts that have one home, and a search that finds every other one: python scripts/homes.py [--markdown]

A row names a concept, the files where it lives and a pattern of what a second home would have to write. Exit
code 1 where a file outside of the home has it. The rows are those of the concepts that this project once had
in several places.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Home(NamedTuple):
    """A concept, what it looks like in code, and where that may be."""

    concept: str
    pattern: str
    files: tuple[str, ...]
    reason: str = ""
    """Why there is more than one file, where there is."""


HOMES = (
    Home(
        "ranks matched by number and by order, on one clock, waits split",
        r"def (match_by_(number|order)|clock_of|align|split_waits|_split_group|_match_group)\(",
        ("ranks/match_by_number.py", "ranks/match_by_order.py", "ranks/common_clock.py", "ranks/waits.py"),
    ),
    Home(
        "waits added to a run",
        r"def (split_waits_of_records|add_waits_of_kinds|add_waits_of_traces)\(",
        ("report/load/waits.py", "report/load/collectives.py", "report/load/traces/waits.py"),
        "metrics of a run, their kinds, and a run from traces",
    ),
    Home(
        "constants and types of matching",
        r"^(MAX_ANCHORS|MIN_ANCHORS|POINT_TO_POINT|ROOTED|UNEVEN)\b.*=|^class GroupKey",
        ("ranks/common_clock.py", "timeline/collective.py"),
        "numbers of anchors; sets of operations and the key of a group",
    ),
    Home(
        "which numbers lead",
        r"def (common_lead|own_lead|is_of_two_kinds|leading)\(",
        ("report/judge/leading.py", "results/leading.py"),
        "a report's runs; points of sweeps, by the same rule",
    ),
    Home("verdicts and exit codes", r"^(FINE|CANNOT_TELL|BAD_INPUT|EXIT_CODES)\b.*=", ("exit_codes.py",)),
    Home(
        "hardware file of a device",
        r"def (hardware_name_of|hardware_names|part_name)\(",
        ("hardware/names.py",),
    ),
    Home("busbw factor", r"def busbw_factor\(", ("timeline/collective.py",)),
    Home("reader of YAML", r"yaml\.(safe_)?load\(|SafeLoader", ("config/yaml_files.py",)),
    Home(
        "files written whole or not at all",
        r"os\.replace\(|temporary\.(re(place|name))\(",
        ("files.py", "device/native/build.py", "profiling/requested.py", "sinks/prometheus.py"),
        "a compiler, torch's profiler and a text for node_exporter write files that they open themselves",
    ),
    Home(
        "one function over many items in processes",
        r"ProcessPoolExecutor|dask\.distributed",
        ("parallel_map.py",),
    ),
    Home(
        "launcher's environment",
        r"os\.environ(\.get)?[\[(]\"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE)\"",
        ("launcher.py",),
    ),
    Home(
        "instants on two clocks, by the tightest of some readings",
        r"[Tt]ightest of",
        ("device/anchors.py", "device/streams.py"),
        "clocks of the host; an event of a device, which nothing but a loop can bracket",
    ),
    Home(
        "garbage collection held back",
        r"gc\.disable\(",
        ("garbage.py", "cli/why.py"),
        "aorta why FILE does without it to its end",
    ),
    Home(
        "numbers in text",
        r":,\.\{\w+\}f|abs\(\w+\) >= 1e4",
        ("report/numbers.py", "queues/cli/numbers.py"),
        "sentences and tables of reports; tables of queues, without a mark between thousands",
    ),
    Home(
        "commands that are imported when they are called",
        r"def (get_command|list_commands)\(|class \w+\((OneLineGroup|click\.Group)\)",
        ("command_line.py",),
    ),
    Home(
        "kernel models by name",
        r"entry_points\(|\"aorta\.\w+_backends\"",
        ("projection/kernels/backends.py", "sinks/sink.py"),
        "models of kernels; sinks of other packages",
    ),
    Home("names of a run's files", r"re\.compile\(r\"rank_|glob\(\"rank_", ("records/files.py",)),
    Home("step records", r"(?<!class )\bStepRecord\(\s*$|return StepRecord\(", ("steps/record.py",)),
    Home(
        "overlap that is not known",
        r"OverlapRecord\($",
        ("steps/record.py", "timeline/overlap.py"),
        "none; one of a window",
    ),
    Home(
        "keys of metrics taken apart",
        r"(removeprefix|startswith|partition)\(\"(calibrated|raw|compute_stream|busbw_gb_s)",
        ("report/metrics.py", "report/judge/gate.py"),
        "meanings of all keys; raw. before a metric of a budget",
    ),
    Home(
        "simulators of streams",
        r"^class _Device:|^def run\(tasks",
        ("programs/simulate/simulator.py", "projection/work/lanes.py"),
        "packets on finite queues of hardware, with processors that refuse; tasks of streams that slow each"
        " other down. Their events have nothing in common but a list in order of time",
    ),
    Home(
        "replaced operators",
        r"def (allreduce_|_allgather_base_|monitored_barrier_)\(",
        ("recording/interception/operators.py",),
    ),
)


class Second(NamedTuple):
    """A line outside of a concept's home."""

    home: Home
    place: str


def second_homes(root: Path = ROOT / "aorta") -> list[Second]:
    """Lines of the package that look like a concept and are not in its home."""
    texts = {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*.py"))}
    return [
        Second(home, f"{name}:{number}")
        for home in HOMES
        for name, text in texts.items()
        if name not in home.files
        for number, line in enumerate(text.splitlines(), start=1)
        if re.search(home.pattern, line)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation")
    options = parser.parse_args()
    if options.markdown:
        print("| concept | home below `aorta/` | why more than one file |\n|---|---|---|")
        for home in HOMES:
            print(f"| {home.concept} | {', '.join(f'`{name}`' for name in home.files)} | {home.reason} |")
    seconds = second_homes()
    for second in seconds:
        print(f"{second.place}: {second.home.concept} lives in {', '.join(second.home.files)}")
    return 1 if seconds else 0


if __name__ == "__main__":
    sys.exit(main())
