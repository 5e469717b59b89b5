"""Judge XID and SXid errors of the NVIDIA driver."""
