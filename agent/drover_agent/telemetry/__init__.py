"""Turn readings into messages: batches, intervals of absence, one event for several lines."""
