"""What produces changes. `SpoolCapture` follows a replication slot into a spool."""
