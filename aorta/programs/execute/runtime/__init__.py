"""Host programs on streams and process groups: instructions, collectives, memory that peers address."""
