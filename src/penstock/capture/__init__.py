"""What produces changes. `WalCapture` follows a replication slot into a spool."""
