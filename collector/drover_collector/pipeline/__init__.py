"""The threads that run the engine, store what it finds and keep the store in order."""
