"""What is done to a table's rows between the source and the target: columns left out, renamed, hashed, masked, cast; rows left out."""

from __future__ import annotations
