"""What the host does in a step: spans of the program, phases of its calls, the thread's use of the cores."""
