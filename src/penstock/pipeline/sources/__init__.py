"""The source of a pipeline: one adapter for each capture method, checks before a run, and the removal of its
objects.
"""
