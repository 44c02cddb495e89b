"""Support for tests and the demo: embedded servers, and the conformance suites of the contracts."""
