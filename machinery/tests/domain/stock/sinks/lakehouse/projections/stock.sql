-- The stock, as a query over the table. Spark, DuckDB and `outbox check` run it unchanged.
SELECT item_id AS key, unit, sum(CAST(quantity AS DECIMAL(38, 0))) AS total, max(version) AS version, count(*) AS events
  FROM events
 GROUP BY item_id, unit
