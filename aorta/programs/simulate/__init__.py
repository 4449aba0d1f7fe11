"""The time of a host program on simulated streams and queues."""
