-- The stock of each item: the sum of its events. Additive, so the order of the events does not matter.
--
-- [refuse]
-- An item keeps the unit of its first event. Events in another unit are refused.
INSERT INTO rejections (event_id, reason, detail)
SELECT new_events.event_id, 'unit mismatch', format('the item is in %%s', home.unit)
  FROM new_events
  JOIN (SELECT DISTINCT ON (event.item_id) event.item_id, coalesce(stored.unit, event.unit) AS unit
          FROM new_events AS event
          LEFT JOIN stock AS stored ON stored.sink = %(sink)s AND stored.item_id = event.item_id
         ORDER BY event.item_id, event.version) AS home USING (item_id)
 WHERE new_events.unit <> home.unit;

-- [apply]
INSERT INTO stock AS stored (sink, item_id, unit, stock, version, events)
SELECT %(sink)s, item_id, min(unit), sum(quantity), max(version), count(*)
  FROM new_events
 GROUP BY item_id
 ORDER BY item_id
ON CONFLICT (sink, item_id) DO UPDATE
   SET stock = stored.stock + excluded.stock,
       version = greatest(stored.version, excluded.version),
       events = stored.events + excluded.events,
       updated_at = now();
