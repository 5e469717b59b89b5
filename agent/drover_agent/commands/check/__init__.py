"""`drover-agent check`: what can be read on this node, what cannot, and how to mend it."""
