"""Distillation without a teacher in memory: its largest log-probabilities written once, then read row by row."""
