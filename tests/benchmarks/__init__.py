"""Benchmarks: ours and its peers on one broker, interleaved. ``python -m tests.benchmarks --help``."""
