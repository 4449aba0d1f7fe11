"""Why a step is as long as it is: causes with milliseconds, and replay of traced steps. No torch."""
