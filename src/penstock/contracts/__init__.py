"""What a capture, a connector, a reference table and a record source promise: abstract classes and values, no I/O."""
