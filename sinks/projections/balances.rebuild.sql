-- The balances as the ledger has them, for `outbox rebuild --from ledger`.
--
-- `ledger` has a row for each row of the view audit_accounts in its database, as JSON. An account's version is that of
-- its last event, so up to there its events are in the balance: balances.sql leaves them out when they come, for the
-- first time or again. What was never in the ledger is worth nothing.
--
-- The last statement gives a row (key, difference) for each account whose balance is another now.
WITH truth AS (
    SELECT (account ->> 'key')::uuid AS account_id, account ->> 'currency' AS currency,
           (account ->> 'total')::numeric AS total, (account ->> 'version')::bigint AS version
      FROM ledger
), settled AS (
    INSERT INTO balances AS stored (sink, account_id, currency, balance_minor, version, events, base_version)
    SELECT %(sink)s, account_id, currency, total, version, 0, version FROM truth ORDER BY account_id
    ON CONFLICT (sink, account_id) DO UPDATE
       SET currency = excluded.currency,
           balance_minor = excluded.balance_minor,
           version = excluded.version,
           base_version = excluded.base_version,
           updated_at = now()
    RETURNING new.account_id, new.balance_minor - coalesce(old.balance_minor, 0) AS difference
), unknown AS (
    UPDATE balances AS stored
       SET balance_minor = 0, base_version = version, updated_at = now()
     WHERE sink = %(sink)s AND NOT EXISTS (SELECT FROM truth WHERE truth.account_id = stored.account_id)
    RETURNING new.account_id, - old.balance_minor AS difference
)
SELECT account_id::text, difference FROM (TABLE settled UNION ALL TABLE unknown) AS changed WHERE difference <> 0;
