"""Opening bases, converted checkpoints, adapters, tokenizers, weight files."""
