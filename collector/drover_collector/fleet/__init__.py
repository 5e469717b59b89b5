"""The fleet as arrays: indices of nodes, GPUs and ports, and buckets of samples."""
