"""The ranks of a run side by side: matched collectives, one clock, waiting and transfer."""
