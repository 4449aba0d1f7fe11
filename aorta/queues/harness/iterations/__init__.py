"""Iterations of a workload: set up on streams, forked and joined, timed in turn with other programs."""
