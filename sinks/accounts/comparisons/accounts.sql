-- The life of each account, column by column. An account from before its life had events is left out until it has one.
-- Then `outbox rebuild accounts --from source` copies its earlier columns from the source, which no event brought.
--
-- [source]
SELECT key, kind, currency, label, status, version FROM source_accounts WHERE version > 0;

-- [sink]
SELECT sink, account_id AS key, kind, currency, label, status, version FROM accounts WHERE version > 0;
