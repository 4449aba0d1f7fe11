"""Small C libraries: their sources, and how they are built on first use."""
