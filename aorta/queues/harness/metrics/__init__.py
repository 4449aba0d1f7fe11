"""Metrics of a point, from what its ranks measured."""
