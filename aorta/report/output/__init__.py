"""Outputs of a report: terminal table, pictures, Parquet."""
