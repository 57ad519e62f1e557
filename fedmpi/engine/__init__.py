"""The round loop: sampling of clients, local training, messages, the server step, and evaluation."""
