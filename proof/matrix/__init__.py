"""The matrix: every strategy, each fault that repeats events, exactly-once on and off; filled by running it.

python -m proof.matrix            measure everything, and compare it with the document
python -m proof.matrix --write    measure everything, and write results.json and the table in docs/strategies.md
"""
