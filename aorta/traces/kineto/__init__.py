"""Reader of Kineto (torch.profiler) traces."""
