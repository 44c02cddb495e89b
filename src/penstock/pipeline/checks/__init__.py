"""Find problems of configuration, source and targets before a run starts."""
