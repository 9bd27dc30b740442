-- It writes the name of one sink instead of its own.
INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
SELECT 'dedup', 'item', item_id, count(*), '{}' FROM new_events GROUP BY item_id
ON CONFLICT (sink, aggregate, key) DO UPDATE SET events = stored.events + excluded.events;
