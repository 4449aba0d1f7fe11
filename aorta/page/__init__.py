"""Everything that shows a run: terminal table, page, pictures, `aorta top`, notebook frames. No torch."""
