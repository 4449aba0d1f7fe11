"""Strategies of overlap timed against each other, and where the time beyond the bound goes."""
