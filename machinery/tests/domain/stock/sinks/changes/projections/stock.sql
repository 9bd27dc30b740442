-- The stock of each item is that of its newest state: the one with the highest version.
--
-- A deleted item stays with a stock of 0 and its version. A deletion has no version, so it counts by its place among the
-- changes of the row.
UPDATE stock AS stored
   SET stock = 0, updated_at = now()
  FROM new_events
 WHERE new_events.op = 'd' AND stored.sink = %(sink)s AND stored.item_id = new_events.item_id;

INSERT INTO stock AS stored (sink, item_id, unit, stock, version, events)
SELECT DISTINCT ON (item_id)
       %(sink)s, item_id, unit, CASE WHEN "offset" < deleted_at THEN 0 ELSE stock END, version, changes
  FROM (SELECT *,
               max("offset") FILTER (WHERE op = 'd') OVER (PARTITION BY item_id) AS deleted_at,
               count(*) OVER (PARTITION BY item_id) AS changes
          FROM new_events) AS change
 WHERE op <> 'd'
 ORDER BY item_id, version DESC, "offset"
ON CONFLICT (sink, item_id) DO UPDATE
   SET unit = excluded.unit,
       stock = excluded.stock,
       version = excluded.version,
       events = stored.events + excluded.events,
       updated_at = now()
 WHERE excluded.version > stored.version;
