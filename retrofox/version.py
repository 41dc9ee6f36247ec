"""The version, which every artefact records."""

__version__ = "0.1.0"
