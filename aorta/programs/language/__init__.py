"""Host programs: text, graph and expressions."""
