-- The parcels that each courier carries.
-- adds: parcels
--
-- [source]
SELECT key, total FROM source_totals;
