-- The state of each order, column by column. By it `outbox rebuild orders --from source` knows what to restore.
-- table: order_states (order_id)
--
-- [source]
SELECT key, status, total AS cents, pieces, version FROM source_orders;
