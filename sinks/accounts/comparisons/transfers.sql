-- In how many transfers each account took part.
-- adds: 1 of balance
--
-- [source]
SELECT key, transfers AS total FROM source_accounts;

-- [sink]
SELECT sink, account_id::text AS key, transfers AS total FROM accounts;
