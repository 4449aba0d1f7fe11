"""Parts of the probe: each builds programs for a machine and reads one fact off their stamps."""
