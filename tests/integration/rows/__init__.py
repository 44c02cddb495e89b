"""What each row operation looks like in the spool: EDGE_CASES R."""
