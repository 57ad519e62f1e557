"""Measurements of a round beyond its metrics (`analysis:`), such as drift or forgetting, distributed over the ranks."""
