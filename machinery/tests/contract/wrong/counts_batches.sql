-- It counts the batches in which a key has events.
INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
SELECT DISTINCT %(sink)s, 'item', item_id, 1, '{}'::text[] FROM new_events
ON CONFLICT (sink, aggregate, key) DO UPDATE SET events = stored.events + 1;
