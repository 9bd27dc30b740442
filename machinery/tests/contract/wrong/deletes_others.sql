-- It deletes the rows of other sinks.
DELETE FROM activity WHERE sink <> %(sink)s AND key IN (SELECT item_id FROM new_events);
INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
SELECT %(sink)s, 'item', item_id, count(*), '{}' FROM new_events GROUP BY item_id
ON CONFLICT (sink, aggregate, key) DO UPDATE SET events = stored.events + excluded.events;
