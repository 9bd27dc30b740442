-- What the customer has written goes with the order.
DELETE FROM orders WHERE sink = %(sink)s AND order_id = %(key)s::uuid;
