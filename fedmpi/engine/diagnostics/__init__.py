"""Additional measurements of rounds (`analysis`), for example client drift or forgetting, spread over the ranks."""
