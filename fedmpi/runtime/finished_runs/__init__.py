"""Work with runs that have ended: load their models, predict with them, export them, replay and verify the run."""
