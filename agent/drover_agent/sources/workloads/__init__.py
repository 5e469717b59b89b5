"""What runs on the node: jobs, training loops, inference servers."""
