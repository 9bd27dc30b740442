-- The parcels of each depot are the sum of its events.
-- adds: count
--
-- [source]
SELECT key, total FROM source_totals;

-- [sink]
SELECT sink, depot_id::text AS key, parcels AS total, version FROM depot_parcels;
