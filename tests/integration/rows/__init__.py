"""Row operations in the spool: edge cases R."""
