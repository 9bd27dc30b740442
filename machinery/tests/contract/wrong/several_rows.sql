-- Two events of a key in a batch stop the sink.
INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
SELECT %(sink)s, 'item', item_id, 1, '{}' FROM new_events
ON CONFLICT (sink, aggregate, key) DO UPDATE SET events = stored.events + 1;
