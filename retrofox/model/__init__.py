"""A converted model's files: exactly these travel to the Hub as remote code (flat, torch and transformers only)."""
