"""Programs for contributors; not a part of the package."""
