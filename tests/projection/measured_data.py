"""The folder of measurements that some tests compare with: larger than a repository should hold."""

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("AORTA_DATA") or "AORTA_DATA is not set")
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="compares with measurements; set AORTA_DATA to the folder that holds them"
)
