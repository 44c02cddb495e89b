"""A pipeline: configuration, tables' states, snapshots, epochs and their record."""
