"""NVIDIA XID and SXid codes: what each means and what it asks for."""
