"""Benchmarks. Each module is a program that compares contenders within one run on one machine."""
