-- How many events each item and each order has had, and of which kinds.
INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
SELECT %(sink)s, split_part(event_type, '.', 1), {key}, count(*), array_agg(DISTINCT event_type)
  FROM new_events
 GROUP BY 2, 3
 ORDER BY 2, 3
ON CONFLICT (sink, aggregate, key) DO UPDATE
   SET events = stored.events + excluded.events,
       kinds = ARRAY(SELECT DISTINCT kind FROM unnest(stored.kinds || excluded.kinds) AS kind ORDER BY kind);
