"""The queue on disk: what is read is stored here before it is sent, and stays until it is acknowledged."""
