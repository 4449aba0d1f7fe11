"""Serving: requests in different phases beside each other."""
