"""The pages of the console, each with its parts next to it."""
