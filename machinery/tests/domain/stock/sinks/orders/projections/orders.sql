-- Each order with its status. A cancellation may be applied before the order, when a dead letter is replayed.
INSERT INTO orders AS stored (sink, order_id, item_id, quantity, unit, version)
SELECT %(sink)s, order_id, item_id, quantity, unit, version FROM new_order_placed ORDER BY order_id
ON CONFLICT (sink, order_id) DO UPDATE
   SET item_id = excluded.item_id,
       quantity = excluded.quantity,
       unit = excluded.unit,
       version = greatest(stored.version, excluded.version);

INSERT INTO orders AS stored (sink, order_id, is_cancelled, reason, version)
SELECT %(sink)s, order_id, true, min(reason), max(version)
  FROM new_order_cancelled GROUP BY order_id ORDER BY order_id
ON CONFLICT (sink, order_id) DO UPDATE
   SET is_cancelled = true, reason = least(stored.reason, excluded.reason),
       version = greatest(stored.version, excluded.version);
