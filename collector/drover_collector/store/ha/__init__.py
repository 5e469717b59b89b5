"""Several collectors on one store: the lease, and the tables of a cluster."""
