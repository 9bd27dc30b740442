-- The balance of each account is the sum of its events. The table says its own totals: projections/balances.sql.
-- adds: amount
--
-- [source]
SELECT key, total FROM source_totals;
