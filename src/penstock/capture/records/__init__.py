"""Records one at a time, from Postgres: a view of `WalCapture` for callers who keep their place themselves."""
