"""Files and containers of traces: kind, archive, decompression, SQLite, cache."""
