-- The number of events as the source has it, for `outbox rebuild --from source`: the version of the entity. The source
-- does not know their kinds.
WITH settled AS (
    INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
    SELECT %(sink)s, aggregate, (total ->> 'key')::uuid, (total ->> 'version')::bigint, '{}'
      FROM source
     ORDER BY 2, 3
    ON CONFLICT (sink, aggregate, key) DO UPDATE SET events = excluded.events
    RETURNING new.key, new.events - coalesce(old.events, 0) AS difference
), unknown AS (
    UPDATE activity AS stored
       SET events = 0
     WHERE sink = %(sink)s
       AND NOT EXISTS (SELECT FROM source
                        WHERE source.aggregate = stored.aggregate AND (total ->> 'key')::uuid = stored.key)
    RETURNING new.key, - old.events AS difference
)
SELECT key::text, sum(difference)
  FROM (TABLE settled UNION ALL TABLE unknown) AS changed
 GROUP BY key
HAVING sum(difference) <> 0;
