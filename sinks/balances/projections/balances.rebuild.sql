-- `outbox rebuild --from source`: set the balances to those of the source.
--
-- `source` has the rows of the view source_totals, as JSON. An account that the source does not have gets a balance of 0.
-- The last statement returns a row (key, difference) for each account whose balance has changed.
WITH truth AS (
    SELECT (total ->> 'key')::uuid AS account_id, total ->> 'currency' AS currency,
           (total ->> 'total')::numeric AS balance, (total ->> 'version')::bigint AS version
      FROM source
), settled AS (
    INSERT INTO balances AS stored (sink, account_id, currency, balance_minor, version, events)
    SELECT %(sink)s, account_id, currency, balance, version, 0 FROM truth ORDER BY account_id
    ON CONFLICT (sink, account_id) DO UPDATE
       SET currency = excluded.currency,
           balance_minor = excluded.balance_minor,
           version = excluded.version,
           updated_at = now()
    RETURNING new.account_id, new.balance_minor - coalesce(old.balance_minor, 0) AS difference
), unknown AS (
    UPDATE balances AS stored
       SET balance_minor = 0, version = 0, updated_at = now()
     WHERE sink = %(sink)s AND NOT EXISTS (SELECT FROM truth WHERE truth.account_id = stored.account_id)
    RETURNING new.account_id, - old.balance_minor AS difference
)
SELECT account_id::text, difference FROM (TABLE settled UNION ALL TABLE unknown) AS changed WHERE difference <> 0;
