"""Training loops of many styles that do not know of aorta, for benchmarks/clients.py."""
