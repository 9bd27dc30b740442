-- The parcels of each depot are the sum of its events.
-- adds: count
--
-- [source]
SELECT key, total FROM source_totals;

-- [sink]
SELECT sink, key, total, version FROM sink_totals;
