-- The key of the table does not have the column sink.
INSERT INTO shared AS stored (sink, item_id, events)
SELECT %(sink)s, item_id, count(*) FROM new_events GROUP BY item_id
ON CONFLICT (item_id) DO UPDATE SET events = stored.events + excluded.events;
