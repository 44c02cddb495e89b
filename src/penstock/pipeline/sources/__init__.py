"""The source of a pipeline: an adapter for each capture method, checks before a run, the separate capture,
and the removal of objects that the pipeline created.
"""
