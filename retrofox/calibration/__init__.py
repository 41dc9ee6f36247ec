"""Fitting gates and queries to the base's own attention, layer by layer."""
