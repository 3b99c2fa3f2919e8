"""Benchmarks: each prints a table, then one JSON line. Run as `python -m bench.NAME`."""
