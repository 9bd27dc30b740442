-- The orders as the source has them, for `outbox rebuild --from source`. Returns a row (key, difference) per change.
WITH truth AS (
    SELECT (total ->> 'key')::uuid AS order_id, total ->> 'status' AS status, (total ->> 'total')::numeric AS cents,
           (total ->> 'pieces')::numeric AS pieces, (total ->> 'version')::bigint AS version
      FROM source
), settled AS (
    INSERT INTO order_states AS stored (sink, order_id, status, cents, pieces, version)
    SELECT %(sink)s, order_id, status, cents, pieces, version FROM truth ORDER BY order_id
    ON CONFLICT (sink, order_id) DO UPDATE
       SET status = excluded.status, cents = excluded.cents, pieces = excluded.pieces, version = excluded.version
    RETURNING new.order_id, new.cents - coalesce(old.cents, 0) AS difference
), unknown AS (
    DELETE FROM order_states AS stored
     WHERE sink = %(sink)s AND NOT EXISTS (SELECT FROM truth WHERE truth.order_id = stored.order_id)
    RETURNING stored.order_id, - stored.cents AS difference
)
SELECT order_id::text, difference FROM (TABLE settled UNION ALL TABLE unknown) AS changed WHERE difference <> 0;
