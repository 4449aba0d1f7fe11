"""The documented name of `aorta.queues`: python -m aorta.hw_queue_eval."""
