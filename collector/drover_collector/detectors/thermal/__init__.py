"""Heat that slows GPUs, cooling that fails, racks that get hot air."""
