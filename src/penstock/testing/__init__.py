"""What tests and the demo run on: real servers, started for the occasion; and the suites that hold
implementations to the contracts.
"""
