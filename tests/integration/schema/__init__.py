"""Every change is decoded under the schema it was written with: EDGE_CASES S."""
