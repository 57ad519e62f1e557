"""The round loop: cohort sampling, local training, messages, the server step, and evaluation."""
