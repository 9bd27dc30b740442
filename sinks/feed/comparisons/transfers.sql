-- In how many transfers each account took part. The topic says how many records of each it has.
-- adds: 1 of balance
--
-- [source]
SELECT key, transfers AS total FROM source_accounts;
