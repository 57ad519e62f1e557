"""All metadata is in pyproject.toml; this file lets old tools (`python setup.py --version`) find it."""

from setuptools import setup

setup()
