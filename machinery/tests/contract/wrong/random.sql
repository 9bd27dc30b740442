-- A value that no event determines.
INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
SELECT %(sink)s, 'item', item_id, (random() * 1e15)::bigint, '{}' FROM new_events GROUP BY item_id
ON CONFLICT (sink, aggregate, key) DO UPDATE SET events = excluded.events;
