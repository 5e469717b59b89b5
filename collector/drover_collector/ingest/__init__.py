"""The agents' streams: from a connection to rows in the store and an Ack."""
