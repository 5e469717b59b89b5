"""How results of probes are judged against the fleet. Pure but for the reads of `judge`."""
