"""Text to packed windows of tokens: reading, encoding, shards, order, packing."""
