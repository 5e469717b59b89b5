"""Network ports: InfiniBand and Ethernet."""
