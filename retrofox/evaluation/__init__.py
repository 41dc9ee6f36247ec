"""Measuring a model against its original: loss by position, recall, needles, tasks, gates."""
