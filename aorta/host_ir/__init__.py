"""The documented name of `aorta.programs`: python -m aorta.host_ir."""
