-- The pieces of each product that were ordered and cancelled each day. A day is one of UTC, whatever the zone of a server.
INSERT INTO sales_by_day AS stored (sink, day, product, ordered, cancelled)
SELECT %(sink)s, (change.occurred_at AT TIME ZONE 'UTC')::date AS day, line.product,
       sum(change.ordered * line.pieces), sum(change.cancelled * line.pieces)
  FROM (SELECT occurred_at, lines, 1 AS ordered, 0 AS cancelled FROM new_order_placed
        UNION ALL
        SELECT occurred_at, lines, 0, 1 FROM new_order_cancelled) AS change,
       jsonb_to_recordset(change.lines) AS line (product text, pieces bigint)
 GROUP BY day, line.product
 ORDER BY line.product, day -- one order for all writers: no deadlocks
ON CONFLICT (sink, product, day) DO UPDATE
   SET ordered = stored.ordered + excluded.ordered,
       cancelled = stored.cancelled + excluded.cancelled;
