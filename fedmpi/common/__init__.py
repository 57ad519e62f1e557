"""Helpers that all other packages may import: errors, seeds, options, the registry of plug-ins, texts of messages."""
