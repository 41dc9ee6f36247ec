"""Generating text and chatting."""
