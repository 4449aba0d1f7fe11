"""From what a recorder noted on a device to records. No torch: it can run in a process of its own."""
