__version__ = "0.1.0"

OLDEST_TORCH = (2, 11)
"""Earlier releases cannot say which reduction an all-reduce has (2.6, 2.8 and 2.9 were tried): recording
would end the program that it records."""
