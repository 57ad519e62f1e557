"""Additional measurements of rounds (section `analysis` of a config), for example client drift or forgetting."""
