"""The earlier names of `aorta.calibration.merge` and `aorta.hang`, as commands."""
