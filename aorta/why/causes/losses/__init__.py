"""What the steps of a run lose: to ranks that wait, exposed transfer, the host, low clocks; each ms once."""
