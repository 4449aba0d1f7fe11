"""Documents of measurements: one schema, comparison with intervals, the headline metric. No torch."""
