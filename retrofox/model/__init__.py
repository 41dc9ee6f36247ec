"""The files of a converted model: exactly these travel to the Hub as remote code (flat, torch and transformers only)."""
