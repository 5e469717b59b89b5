"""The engine: buckets and events in; findings, incidents and decisions out. Pure: no I/O."""
