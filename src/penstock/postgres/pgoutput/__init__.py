"""Decoder for the logical replication protocol of pgoutput. It decodes many messages at a time. Pure: bytes
in, Arrow out.
"""
