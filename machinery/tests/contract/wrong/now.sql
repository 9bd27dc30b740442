-- The time is that of the sink, not of the event.
INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
SELECT %(sink)s, 'item', item_id, 0, ARRAY[now()::text] FROM new_events GROUP BY item_id
ON CONFLICT (sink, aggregate, key) DO UPDATE SET kinds = excluded.kinds;
