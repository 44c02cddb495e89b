"""Source and targets compared, row by row where they differ."""
