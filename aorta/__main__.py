"""python -m aorta: the command `aorta`."""

from aorta.cli import main

if __name__ == "__main__":
    main(prog_name="aorta")
