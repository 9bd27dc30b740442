-- The balances, as a query over the table. Each event is in it once, so the amounts add up. Spark, DuckDB and
-- `outbox check` run this query unchanged; `check` compares `total` and `version` with the source, by `key`.
SELECT account_id AS key, currency, sum(CAST(amount AS DECIMAL(38, 0))) AS total, max(version) AS version, count(*) AS events
  FROM events
 GROUP BY account_id, currency
