-- The stock of each item is the sum of its events. The table says its own totals: projections/stock.sql.
-- adds: quantity
--
-- [source]
SELECT key, total FROM source_totals;
