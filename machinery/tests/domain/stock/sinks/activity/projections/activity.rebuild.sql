-- The number of events as the source has it, for `outbox rebuild --from source`: the version of the entity. The source
-- does not know their kinds.
WITH before AS (
    SELECT aggregate, key, events AS former FROM activity WHERE sink = %(sink)s
), settled AS (
    INSERT INTO activity AS stored (sink, aggregate, key, events, kinds)
    SELECT %(sink)s, aggregate, (total ->> 'key')::uuid, (total ->> 'version')::bigint, '{}'
      FROM source
     ORDER BY 2, 3
    ON CONFLICT (sink, aggregate, key) DO UPDATE SET events = excluded.events
    RETURNING aggregate, key, events
), unknown AS (
    UPDATE activity AS stored
       SET events = 0
     WHERE sink = %(sink)s
       AND NOT EXISTS (SELECT FROM source
                        WHERE source.aggregate = stored.aggregate AND (total ->> 'key')::uuid = stored.key)
    RETURNING aggregate, key, events
)
SELECT key::text, sum(events - coalesce(former, 0))
  FROM (TABLE settled UNION ALL TABLE unknown) AS changed LEFT JOIN before USING (aggregate, key)
 GROUP BY key
HAVING sum(events - coalesce(former, 0)) <> 0;
