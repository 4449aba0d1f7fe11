"""Host programs: text, graph, expressions and the passes that rewrite them."""
