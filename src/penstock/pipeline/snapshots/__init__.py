"""Snapshots and resyncs: plan chunks, read them on executors, repair, commit, swap."""
