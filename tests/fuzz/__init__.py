"""Fuzzing: millions of damaged pgoutput streams for the decoder and the oracle, and texts of any kind for the
type readers.

`make fuzz` runs them at length. The decoder must refuse with a `ProtocolError` what the oracle refuses, and
decode to the same rows what the oracle decodes. Cases come in batches of many thousands. A case is identified
by its subject, the number of its batch and its number in the batch, and is the same in every run.
"""
