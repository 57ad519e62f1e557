"""Load the settings of a run from YAML. torch is not imported, so that ranks report a mistake without delay."""

from fedmpi.config.loading import load
from fedmpi.config.schema import Settings

__all__ = ["Settings", "load"]
