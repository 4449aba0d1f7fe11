"""python -m aorta.queues"""

from aorta.queues.cli import main

if __name__ == "__main__":
    main()
