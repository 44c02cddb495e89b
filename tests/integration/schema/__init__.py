"""Every change is decoded with the schema it was written under: edge cases S."""
