-- The stock as the source has it, for `outbox rebuild --from source`. Returns a row (key, difference) per change.
WITH truth AS (
    SELECT total ->> 'key' AS product, (total ->> 'total')::numeric AS pieces, (total ->> 'version')::bigint AS version
      FROM source
), settled AS (
    INSERT INTO stock_levels AS stored (sink, product, pieces, version)
    SELECT %(sink)s, product, pieces, version FROM truth ORDER BY product
    ON CONFLICT (sink, product) DO UPDATE SET pieces = excluded.pieces, version = excluded.version
    RETURNING new.product, new.pieces - coalesce(old.pieces, 0) AS difference
), unknown AS ( -- what was never in the source has no pieces
    UPDATE stock_levels AS stored SET pieces = 0, version = 0
     WHERE sink = %(sink)s AND NOT EXISTS (SELECT FROM truth WHERE truth.product = stored.product)
    RETURNING new.product, - old.pieces AS difference
)
SELECT product, difference FROM (TABLE settled UNION ALL TABLE unknown) AS changed WHERE difference <> 0;
