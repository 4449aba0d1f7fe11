"""Traces as runs of a report: each rank reduced to its numbers, ranks matched by order."""
