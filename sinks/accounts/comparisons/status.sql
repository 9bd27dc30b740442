-- The status of each account, as a number, because totals are compared. Accounts from before their life had events are
-- left out until it has one. A status is no sum, so it is compared when nothing is in flight.
--
-- [source]
SELECT key, array_position(ARRAY['open', 'frozen', 'closed'], status) AS total FROM source_accounts WHERE version > 0;

-- [sink]
SELECT sink, account_id::text AS key, array_position(ARRAY['open', 'frozen', 'closed'], status) AS total
  FROM accounts
 WHERE version > 0;
