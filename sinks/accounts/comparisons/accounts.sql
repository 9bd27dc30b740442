-- The life of each account, column by column. Accounts from before their life had events are left out until they have
-- one; then `outbox rebuild accounts --from source` tells the sink what it cannot know.
--
-- [source]
SELECT key, kind, currency, label, status, version FROM source_accounts WHERE version > 0;

-- [sink]
SELECT sink, account_id AS key, kind, currency, label, status, version FROM accounts WHERE version > 0;
