"""Benchmarks. Figures are one machine's: compare the ratios of one run."""
