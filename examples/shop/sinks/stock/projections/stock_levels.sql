-- The pieces of each product: a sum, so the order of the events does not matter.
INSERT INTO stock_levels AS stored (sink, product, pieces, version)
SELECT %(sink)s, product, sum(CASE event_type WHEN 'stock.added' THEN pieces ELSE - pieces END), max(version)
  FROM new_events
 GROUP BY product
 ORDER BY product -- one order for all writers: no deadlocks
ON CONFLICT (sink, product) DO UPDATE
   SET pieces = stored.pieces + excluded.pieces,
       version = greatest(stored.version, excluded.version);
