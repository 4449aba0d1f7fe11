"""What-ifs: edits of a graph before it is replayed."""

from aorta.why.replay.changes.change import Change
from aorta.why.replay.changes.parse import forms, parse_change, parse_changes

__all__ = ["Change", "forms", "parse_change", "parse_changes"]
