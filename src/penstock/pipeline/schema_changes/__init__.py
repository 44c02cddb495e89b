"""Detection of schema changes, and planning of the target's next schema."""
