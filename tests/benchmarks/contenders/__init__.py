"""The contenders: one module each, all with the same protocol, see :mod:`tests.benchmarks.contenders.protocol`."""
