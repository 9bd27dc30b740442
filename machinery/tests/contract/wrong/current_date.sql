-- The same by a word that is no function.
INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
SELECT %(sink)s, 'item', item_id, 0, ARRAY[CURRENT_DATE::text] FROM new_events GROUP BY item_id
ON CONFLICT (sink, aggregate, key) DO UPDATE SET kinds = excluded.kinds;
