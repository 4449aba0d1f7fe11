from aorta.programs.cli import main

main(prog_name="python -m aorta.programs")
