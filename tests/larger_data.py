"""The larger data that some tests read: the folder that AORTA_DATA names, which is no part of the repository.

Its layout: traces/ and traces_foreign/ (kernel traces), h200/ (measured prices), public/ (published
throughput), runs/ (recorded runs).
"""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("AORTA_DATA") or "AORTA_DATA-is-not-set")
TRACES = FOLDER / "traces"


def needs_data(*paths: Path) -> pytest.MarkDecorator:
    """Skip a test where one of these paths below FOLDER is missing; without paths, where FOLDER is."""
    return pytest.mark.skipif(
        any(not path.exists() for path in paths or (FOLDER,)), reason=why_missing(*paths)
    )


def why_missing(*paths: Path) -> str:
    """Say what a test needs, and which variable names the folder."""
    names = ", ".join(str(path.relative_to(FOLDER)) for path in paths)
    return f"needs {names or 'larger data'}: set AORTA_DATA to the folder that holds it"
