"""Benchmarks. The figures depend on the machine: compare ratios within one run."""
