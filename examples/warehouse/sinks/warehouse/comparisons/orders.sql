-- The newest state of each order. The warehouse's side is the function `totals` of the target.
--
-- [source]
SELECT key, total, version FROM source_orders;
