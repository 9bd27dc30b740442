-- The stock of each item, as of the newest version that has come.
--
-- [source]
SELECT key, total, version FROM source_totals;

-- [sink]
SELECT sink, key, total, version FROM sink_totals;
