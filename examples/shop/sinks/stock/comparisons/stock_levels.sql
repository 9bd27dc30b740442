-- The row of each product. By it `outbox rebuild stock --from source` knows what to restore.
-- table: stock_levels (product)
--
-- [source]
SELECT key, total AS pieces, version FROM source_stock;
