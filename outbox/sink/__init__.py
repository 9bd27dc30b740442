"""The sink engine: Kafka to Postgres through Spark, each batch in one transaction with the position it leads to."""
