"""What the hardware queues do with many streams."""
