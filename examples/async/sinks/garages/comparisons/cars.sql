-- The cars in each garage are the sum of its events.
-- adds: change
--
-- [source]
SELECT key, total FROM source_totals;

-- [sink]
SELECT sink, key, total, version FROM sink_totals;
