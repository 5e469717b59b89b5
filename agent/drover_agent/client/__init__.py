"""The module that a training loop imports to report its steps."""
