-- What the transfers of each account come to, whatever their direction. A debit has a negative amount, so no property
-- of the events says what they add: it is compared when nothing is in flight.
--
-- [source]
SELECT key, turnover AS total FROM source_accounts;

-- [sink]
SELECT sink, account_id::text AS key, turnover_minor AS total FROM accounts;
