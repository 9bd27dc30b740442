-- The parcels as the source has them, for `outbox rebuild --from source`. Returns a row (key, difference) per change.
WITH truth AS (
    SELECT (total ->> 'key')::uuid AS depot_id, (total ->> 'total')::numeric AS parcels,
           (total ->> 'version')::bigint AS version
      FROM source
), settled AS (
    INSERT INTO depot_parcels AS stored (sink, depot_id, parcels, version)
    SELECT %(sink)s, depot_id, parcels, version FROM truth ORDER BY depot_id
    ON CONFLICT (sink, depot_id) DO UPDATE SET parcels = excluded.parcels, version = excluded.version
    RETURNING new.depot_id, new.parcels - coalesce(old.parcels, 0) AS difference
), unknown AS ( -- what was never in the source is worth nothing
    UPDATE depot_parcels AS stored SET parcels = 0, version = 0
     WHERE sink = %(sink)s AND NOT EXISTS (SELECT FROM truth WHERE truth.depot_id = stored.depot_id)
    RETURNING new.depot_id, - old.parcels AS difference
)
SELECT depot_id::text, difference FROM (TABLE settled UNION ALL TABLE unknown) AS changed WHERE difference <> 0;
