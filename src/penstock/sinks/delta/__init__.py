"""Delta tables: commits to their log, deletion vectors for deleted rows, and MERGE by Spark for unsupported
tables.
"""
