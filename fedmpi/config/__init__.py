"""Load the settings of a run from YAML. Torch is not imported, so that every rank reports a mistake at once."""

from fedmpi.config.loading import load
from fedmpi.config.schema import Settings

__all__ = ["Settings", "load"]
