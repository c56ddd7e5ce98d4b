"""Helpers that benchmarks share: emulated hosts, worker processes, options and result tables."""
