"""The sources of a node, a file each: what they read and how."""
