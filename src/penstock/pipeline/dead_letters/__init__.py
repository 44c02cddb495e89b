"""Dead-letter queue: rejected rows, their storage and their replay."""
