-- The value of each order is the sum of its events.
-- adds: cents
--
-- [source]
SELECT key, total FROM source_orders;

-- [sink]
SELECT sink, order_id::text AS key, cents AS total, version FROM order_states;
