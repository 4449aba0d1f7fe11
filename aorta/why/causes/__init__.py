"""Why a step is as long as it is: causes with milliseconds at stake, evidence, and what to change."""
