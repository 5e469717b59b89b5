"""From readings to messages: batches, intervals of absence, one event for several lines."""
