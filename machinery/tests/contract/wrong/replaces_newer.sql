-- An older event that is replayed replaces a newer one.
INSERT INTO stock AS stored (sink, item_id, unit, stock, version, events)
SELECT DISTINCT ON (item_id) %(sink)s, item_id, unit, stock_after, version, 0 FROM new_events
 ORDER BY item_id, version DESC
ON CONFLICT (sink, item_id) DO UPDATE SET unit = excluded.unit, stock = excluded.stock, version = excluded.version;
