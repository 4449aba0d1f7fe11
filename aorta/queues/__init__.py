"""Behaviour of hardware queues under many streams."""
