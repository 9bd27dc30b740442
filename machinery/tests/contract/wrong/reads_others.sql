-- It looks up a row without saying whose.
INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
SELECT %(sink)s, 'item', item_id,
       count(*) + coalesce((SELECT max(known.events) FROM activity AS known WHERE known.key = item_id), 0), '{}'
  FROM new_events
 GROUP BY item_id
ON CONFLICT (sink, aggregate, key) DO UPDATE SET events = excluded.events;
