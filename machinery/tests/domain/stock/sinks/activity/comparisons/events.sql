-- How many events each item and each order has had.
--
-- adds: 1

-- [source]
SELECT key, version AS total FROM source_totals UNION ALL SELECT key, version FROM source_orders

-- [sink]
SELECT sink, key, events AS total FROM activity
