-- The balances, as a query over the table: its events are there once, so they simply add up. As it stands here it runs in
-- Spark, DuckDB and `outbox check`, which compares `total` and `version` with the ledger by `key`.
SELECT account_id AS key, currency, sum(CAST(amount AS DECIMAL(38, 0))) AS total, max(version) AS version, count(*) AS events
  FROM events
 GROUP BY account_id, currency
