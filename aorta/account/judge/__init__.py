"""What the numbers of runs say: headline metric, comparison, gate, summary."""
