"""Layers of a pipeline stage on streams, and the order of the stages' micro-batches."""
