"""python -m aorta.host_ir"""

from aorta.programs.cli import main

if __name__ == "__main__":
    main(prog_name="python -m aorta.host_ir")
