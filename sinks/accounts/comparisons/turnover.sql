-- What the transfers of each account come to, whatever their direction: the amount of a debit is negative.
-- adds: amount of balance.credited
-- adds: -amount of balance.debited
--
-- [source]
SELECT key, turnover AS total FROM source_accounts;

-- [sink]
SELECT sink, account_id::text AS key, turnover_minor AS total FROM accounts;
