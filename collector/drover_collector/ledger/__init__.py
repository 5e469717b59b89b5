"""The ledger: what every held GPU-hour was used for, exact to the millisecond, and the availability of nodes. Pure."""
