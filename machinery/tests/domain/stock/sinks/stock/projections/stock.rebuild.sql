-- The stock as the source has it, for `outbox rebuild --from source`.
--
-- `source` has a row per row of the view source_totals, as JSON. What is not in the source is worth nothing. The last
-- statement returns a row (key, difference) for each item whose stock has changed.
WITH truth AS (
    SELECT (total ->> 'key')::uuid AS item_id, total ->> 'unit' AS unit,
           (total ->> 'total')::numeric AS stock, (total ->> 'version')::bigint AS version
      FROM source
), before AS (
    SELECT item_id, stock AS former FROM stock WHERE sink = %(sink)s
), settled AS (
    INSERT INTO stock AS stored (sink, item_id, unit, stock, version, events)
    SELECT %(sink)s, item_id, unit, stock, version, 0 FROM truth ORDER BY item_id
    ON CONFLICT (sink, item_id) DO UPDATE
       SET unit = excluded.unit,
           stock = excluded.stock,
           version = excluded.version,
           updated_at = now()
    RETURNING item_id, stored.stock
), unknown AS (
    UPDATE stock AS stored
       SET stock = 0, version = 0, updated_at = now()
     WHERE sink = %(sink)s AND NOT EXISTS (SELECT FROM truth WHERE truth.item_id = stored.item_id)
    RETURNING item_id, stored.stock
)
SELECT item_id::text, changed.stock - coalesce(former, 0) AS difference
  FROM (TABLE settled UNION ALL TABLE unknown) AS changed LEFT JOIN before USING (item_id)
 WHERE changed.stock <> coalesce(former, 0);
