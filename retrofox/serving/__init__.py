"""Converted models under other engines: the vLLM plug-in, what it refuses, and the proof that it serves them right."""
