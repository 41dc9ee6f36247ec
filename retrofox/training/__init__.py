"""Adapting a converted model: stages, objectives, checkpoints, resuming."""
