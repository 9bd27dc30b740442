-- The source has no days. All days of a product together are what is ordered and not cancelled. A product is not the key
-- of these events, so no property of theirs says what they add.
--
-- [source]
SELECT key, total FROM source_demand;

-- [sink]
SELECT sink, product AS key, sum(ordered - cancelled) AS total FROM sales_by_day GROUP BY sink, product;
