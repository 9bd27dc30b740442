-- The stock of each item, as its newest event states it: for strategies that take states.
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
SELECT DISTINCT ON (item_id)
       %(sink)s, item_id, unit, stock_after, version, count(*) OVER (PARTITION BY item_id)
  FROM new_events
 ORDER BY item_id, version DESC
ON CONFLICT (sink, item_id) DO UPDATE
   SET stock = excluded.stock,
       version = excluded.version,
       events = stored.events + excluded.events,
       updated_at = now()
 WHERE excluded.version > stored.version;
