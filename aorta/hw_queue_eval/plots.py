"""Pictures of a sweep, PNG."""

from pathlib import Path

from aorta.hw_queue_eval.core.results import Document


def draw(document: Document, folder: Path, overwrite: bool = False) -> list[Path]:
    """One picture for each scaling of the document; the files that were written."""
    return []
