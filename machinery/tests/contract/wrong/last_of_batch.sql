-- Which event of a key is the last one of a batch is not said.
INSERT INTO stock AS stored (sink, item_id, unit, stock, version, events)
SELECT DISTINCT ON (item_id) %(sink)s, item_id, unit, stock_after, version, 0 FROM new_events
ON CONFLICT (sink, item_id) DO UPDATE SET unit = excluded.unit, stock = excluded.stock, version = excluded.version;
