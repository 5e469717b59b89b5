"""Several collectors on one store: the lease, and what one learns of the others."""
