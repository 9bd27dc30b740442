-- The pieces of each product.
-- adds: pieces of stock.added
-- adds: -pieces of stock.taken
--
-- [source]
SELECT key, total FROM source_stock;

-- [sink]
SELECT sink, product AS key, pieces AS total, version FROM stock_levels;
