"""What tests and the demo run on: real servers, started for the occasion."""
