"""Everything that shows a run: terminal table, page, `aorta top`, notebook frames. No torch."""
