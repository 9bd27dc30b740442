"""Mutants of the pure parts that a tool makes, and those that no unit test notices."""
