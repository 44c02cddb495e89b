"""Damaged streams of pgoutput, millions of them, for the decoder and the oracle; and texts of any kind for the readers of every type.

`make fuzz` runs them at length. The decoder must refuse with a `ProtocolError` what the oracle refuses, and decode to the same rows what
the oracle decodes. Cases come in lots of many thousands; one is known by its subject, the number of its lot and its own in that, and is
the same whenever it is run.
"""
