"""The pipeline: table states, snapshots, epochs and their log, dead letters, verify."""
