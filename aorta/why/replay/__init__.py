"""Replay of traced steps: a dependency graph over all ranks, its critical path, and what-ifs. No torch."""
