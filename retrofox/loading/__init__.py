"""Opening what is there: bases, converted checkpoints, adapters, tokenizers, weight files."""
