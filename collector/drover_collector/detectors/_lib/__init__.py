"""What several detectors share: windows, robust statistics, peers, words."""
