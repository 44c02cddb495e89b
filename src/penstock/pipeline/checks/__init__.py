"""What can be wrong with a configuration, its source and its targets, found before anything is done."""
