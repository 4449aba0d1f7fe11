"""aorta/queues/catalogue.json from the workloads: `python scripts/queues_catalogue.py`."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

from aorta.queues.catalogue import CATALOGUE, ListedWorkload  # noqa: E402
from aorta.queues.options import fields  # noqa: E402
from aorta.queues.workload import Workload  # noqa: E402
from aorta.queues.workloads import workloads  # noqa: E402


def listed(kinds: Iterable[type[Workload]]) -> list[ListedWorkload]:
    """What the catalogue says of these workloads."""
    return [
        ListedWorkload(
            name=kind.name,
            priority=kind.priority,
            unit=kind.unit,
            question=kind.question,
            stream_meaning=kind.stream_meaning,
            min_streams=kind.min_streams,
            max_streams=kind.max_streams,
            options=tuple(fields(kind.Options).values()),
        )
        for kind in kinds
    ]


def text() -> bytes:
    """The file."""
    return msgspec.json.format(msgspec.json.encode(listed(workloads().values())), indent=1) + b"\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    CATALOGUE.write_bytes(text())
