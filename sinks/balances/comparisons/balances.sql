-- The balance of each account is the sum of its events.
-- adds: amount
--
-- [source]
SELECT key, total FROM source_totals;

-- [sink]
SELECT sink, account_id::text AS key, balance_minor AS total, version FROM balances;
