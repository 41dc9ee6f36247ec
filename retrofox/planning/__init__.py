"""Memory, time, disk and refusals of a run, before it runs."""
