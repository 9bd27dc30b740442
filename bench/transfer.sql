-- The statements of service.transfer.transfer, for pgbench: lock, claim the key, write, append. ACCOUNTS is a variable.
\set low random(1, :accounts - 1)
\set high random(:low + 1, :accounts)
BEGIN;
SELECT id, kind, currency, balance_minor, version FROM accounts
 WHERE id IN (lpad(to_hex(:low), 32, '0')::uuid, lpad(to_hex(:high), 32, '0')::uuid)
 ORDER BY id FOR NO KEY UPDATE;
WITH expired AS (
    DELETE FROM idempotency_keys
     WHERE (client, route, key) IN (
           SELECT client, route, key FROM idempotency_keys
            WHERE expires_at <= now() AND (client, route, key) <> ('default', 'bench', 'none')
            ORDER BY expires_at LIMIT 2 FOR UPDATE SKIP LOCKED)
)
INSERT INTO idempotency_keys AS taken (client, route, key, request_hash, status, body, expires_at)
VALUES ('default', 'bench', gen_random_uuid()::text, '\x3a6eb0790f39ac87c94f3856b2dd2c5d110e6811602261a9a923d3bb23adc8b7',
        201, '{"id":"01a20497-3093-7226-b63c-5ab791b7584a","from_account":"00000000-0000-0000-0000-000000000001","to_account":"00000000-0000-0000-0000-000000000002","amount":1,"currency":"EUR","created_at":"2026-11-22T12:00:00.000000Z"}',
        now() + make_interval(hours => 24))
ON CONFLICT (client, route, key) DO UPDATE
   SET request_hash = excluded.request_hash, status = excluded.status, body = excluded.body,
       expires_at = excluded.expires_at
 WHERE taken.expires_at <= now();
UPDATE accounts
   SET balance_minor = accounts.balance_minor + after.amount_minor, version = accounts.version + 1
  FROM unnest(ARRAY[lpad(to_hex(:low), 32, '0')::uuid, lpad(to_hex(:high), 32, '0')::uuid], ARRAY[-1, 1])
       AS after (id, amount_minor)
 WHERE accounts.id = after.id;
INSERT INTO transfers (id, from_account_id, to_account_id, amount_minor, currency, created_at)
VALUES (gen_random_uuid(), lpad(to_hex(:low), 32, '0')::uuid, lpad(to_hex(:high), 32, '0')::uuid, 1, 'EUR', now());
INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, schema_version, traceparent)
SELECT uuidv7(), 'balance', lpad(to_hex(place), 32, '0')::uuid::text, 'credited',
       '{"transfer_id":"01a20497-3093-7226-b63c-5ab791b7584a","account_id":"00000000-0000-0000-0000-000000000001","amount":1,"currency":"EUR","balance_after":1000,"version":10,"occurred_at":"2026-11-22T12:00:00.000000Z"}'::jsonb,
       1, NULL
  FROM (VALUES (:low), (:high)) AS both_accounts (place);
COMMIT;
