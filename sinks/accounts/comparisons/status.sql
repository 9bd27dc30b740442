-- The status of each account, as a number, because totals are compared. No event adds to it, so it is compared when the
-- sink has applied every event. Accounts from before their life had events are left out until it has one.
--
-- [source]
SELECT key, array_position(ARRAY['open', 'frozen', 'closed'], status) AS total FROM source_accounts WHERE version > 0;

-- [sink]
SELECT sink, account_id::text AS key, array_position(ARRAY['open', 'frozen', 'closed'], status) AS total
  FROM accounts
 WHERE version > 0;
