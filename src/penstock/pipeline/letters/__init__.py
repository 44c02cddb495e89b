"""Dead letters: changes that a table refuses, kept until they are replayed."""
