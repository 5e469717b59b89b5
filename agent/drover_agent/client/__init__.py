"""What a training loop imports to report its steps."""
