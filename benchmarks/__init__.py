"""Benchmarks, in one folder per question; `python -m benchmarks list` shows them."""
