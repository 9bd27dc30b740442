"""The sink engine: Kafka to Postgres through Spark, each batch, or part of a large one, in one transaction with the
position it leads to.
"""
