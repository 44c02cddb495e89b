"""Delta tables: commits to their log, rows taken away by deletion vectors, merges where these do not do."""
