"""The agent of one node: reads its hardware and streams what it reads to a collector."""
