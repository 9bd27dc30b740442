-- Of a key it adds the first event of a batch only.
INSERT INTO stock AS stored (sink, item_id, unit, stock, version, events)
SELECT DISTINCT ON (item_id) %(sink)s, item_id, '', quantity, 0, 0 FROM new_events ORDER BY item_id, version
ON CONFLICT (sink, item_id) DO UPDATE SET stock = stored.stock + excluded.stock;
