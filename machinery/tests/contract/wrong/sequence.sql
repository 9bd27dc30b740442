-- Rows are numbered in the order in which the events come.
INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
SELECT %(sink)s, 'item', item_id, max(number), '{}'
  FROM (SELECT item_id, nextval('numbers') AS number FROM new_events) AS numbered
 GROUP BY item_id
ON CONFLICT (sink, aggregate, key) DO UPDATE SET events = excluded.events;
