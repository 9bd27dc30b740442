-- The version that each order has reached. No event adds to it, so it is compared while nothing is in flight.

-- [source]
SELECT key, version AS total FROM source_orders

-- [sink]
SELECT sink, order_id AS key, version AS total, version FROM orders
