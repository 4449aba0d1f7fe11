"""Readers of rocprofv3's formats."""
