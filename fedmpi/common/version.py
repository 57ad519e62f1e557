"""The version of fedmpi."""

__version__ = "0.1.0"
