-- The state of each order. Its events must come in order.
-- ordered
--
-- [refuse]
-- An order takes the steps that the service allows, one after the other.
INSERT INTO rejections (event_id, reason, detail)
SELECT event_id, 'step not allowed', format('%%s after %%s', event_type, before)
  FROM (SELECT new.event_id, new.event_type,
               coalesce(lag(new.event_type) OVER (PARTITION BY new.order_id ORDER BY new.version),
                        'order.' || stored.status, 'nothing') AS before
          FROM new_events AS new
          LEFT JOIN order_states AS stored ON stored.sink = %(sink)s AND stored.order_id = new.order_id) AS steps
 WHERE (before, event_type) NOT IN (
       ('nothing', 'order.placed'),
       ('order.placed', 'order.cancelled'));

-- [apply]
INSERT INTO order_states AS stored (sink, order_id, status, cents, pieces, version)
SELECT DISTINCT ON (order_id)
       %(sink)s, order_id, split_part(event_type, '.', 2), sum(cents) OVER of_order,
       coalesce(sum(pieces) OVER of_order, 0), version -- a cancellation has no pieces
  FROM new_events
WINDOW of_order AS (PARTITION BY order_id)
 ORDER BY order_id, version DESC -- one order for all writers: no deadlocks
ON CONFLICT (sink, order_id) DO UPDATE
   SET status = excluded.status,
       cents = stored.cents + excluded.cents,
       pieces = stored.pieces + excluded.pieces,
       version = excluded.version;
