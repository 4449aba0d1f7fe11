"""python -m aorta.hw_queue_eval"""

from aorta.queues.cli import main

if __name__ == "__main__":
    main()
