"""What is measured of a round beside its metrics (`analysis:`), spread over the ranks."""
