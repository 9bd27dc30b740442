-- The offset becomes a value.
INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
SELECT %(sink)s, 'item', item_id, max("offset"), '{}' FROM new_events GROUP BY item_id
ON CONFLICT (sink, aggregate, key) DO UPDATE SET events = excluded.events;
