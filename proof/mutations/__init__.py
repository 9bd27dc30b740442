"""Mutations of our own code: each breaks one promise, and a test must notice it. `make mutations` tries them."""
