"""The agent's queue on disk: data is stored here before it is sent, and stays until it is acknowledged."""
