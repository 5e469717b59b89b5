"""Share windows, robust statistics, peers and texts among detectors."""
