-- The elements are in the order in which Postgres reads the rows.
INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
SELECT %(sink)s, 'item', item_id, 0, array_agg(quantity::text) FROM new_events GROUP BY item_id
ON CONFLICT (sink, aggregate, key) DO UPDATE SET kinds = stored.kinds || excluded.kinds;
