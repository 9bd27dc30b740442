-- It adds up `batch`, which has repeated events too.
INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
SELECT %(sink)s, 'item', item_id, count(*), '{}' FROM outbox_batch GROUP BY item_id
ON CONFLICT (sink, aggregate, key) DO UPDATE SET events = stored.events + excluded.events;
