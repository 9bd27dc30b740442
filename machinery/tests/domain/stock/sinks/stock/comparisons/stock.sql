-- The stock of each item. An event changes it by its quantity.
--
-- adds: quantity

-- [source]
SELECT key, total FROM source_totals

-- [sink]
SELECT sink, key, total, version FROM sink_totals
