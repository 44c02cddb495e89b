"""Damaged streams of pgoutput, millions of them, given to the decoder and to the oracle: `make fuzz`.

The decoder must refuse with a `ProtocolError` what the oracle refuses, and decode to the same rows what the oracle decodes. Streams come in
lots of many thousands; a case is known by the number of its lot and its own in it, and is the same whenever it is run.
"""
