from aorta.projection.cli import main

main(prog_name="python -m aorta.projection")
