"""The earlier names of `aorta.merge.command` and `aorta.hang`, as commands."""
