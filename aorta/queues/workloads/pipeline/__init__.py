"""Stages that feed each other: loading, offloading, compiled regions."""
