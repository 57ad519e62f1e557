"""The command line; `main` is the console's entry."""

from fedmpi.cli.main import app, main

__all__ = ["app", "main"]
