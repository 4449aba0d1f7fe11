"""Training steps: communication beside compute."""
