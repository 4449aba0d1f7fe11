"""Times collectives: by events, by the host's clock, by the driver's kernel records."""
