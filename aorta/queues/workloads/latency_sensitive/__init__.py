"""Small kernels and how long they wait: what the queues themselves do."""
