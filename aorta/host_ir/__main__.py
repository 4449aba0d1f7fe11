from aorta.host_ir.cli import main

main(prog_name="python -m aorta.host_ir")
