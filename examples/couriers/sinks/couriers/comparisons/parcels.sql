-- The parcels that each courier carries. The side of Cassandra is the function `totals` of the target.
--
-- [source]
SELECT key, total, version FROM source_totals;
