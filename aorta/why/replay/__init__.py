"""One traced step over all ranks as a dependency graph: replay, critical path, what-ifs. No torch."""
