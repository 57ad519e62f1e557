"""Helpers for all other packages: errors, seeds, options, the registry of plug-ins, and message texts."""
