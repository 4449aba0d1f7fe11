"""Sees every collective of the process and every wait for one, by whatever path."""
