"""The command line: parses and calls, no logic. Importing it imports no torch."""

from retrofox.cli.app import main

__all__ = ["main"]
