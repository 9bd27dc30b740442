-- The balance of each account, as of the newest version that has come.
--
-- [source]
SELECT key, total, version FROM source_totals;

-- [sink]
SELECT sink, account_id::text AS key, balance_minor AS total, version FROM balances;
