-- The row of each depot. By it `outbox rebuild depots --from source` knows what to restore.
-- table: depot_parcels (depot_id)
--
-- [source]
SELECT key, total AS parcels, version FROM source_totals;
