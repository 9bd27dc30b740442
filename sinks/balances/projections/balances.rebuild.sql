-- `outbox rebuild --from source`: set the balances to those of the source.
--
-- `source` has the rows of the view source_totals, as JSON. An account that the source does not have gets a balance of 0.
-- The last statement returns a row (key, difference) for each account whose balance has changed.
WITH truth AS (
    SELECT (total ->> 'key')::uuid AS account_id, total ->> 'currency' AS currency,
           (total ->> 'total')::numeric AS balance, (total ->> 'version')::bigint AS version
      FROM source
), before AS (
    SELECT account_id, balance_minor AS former FROM balances WHERE sink = %(sink)s
), settled AS (
    INSERT INTO balances AS stored (sink, account_id, currency, balance_minor, version, events)
    SELECT %(sink)s, account_id, currency, balance, version, 0 FROM truth ORDER BY account_id
    ON CONFLICT (sink, account_id) DO UPDATE
       SET currency = excluded.currency,
           balance_minor = excluded.balance_minor,
           version = excluded.version,
           updated_at = now()
    RETURNING account_id, balance_minor
), unknown AS (
    UPDATE balances AS stored
       SET balance_minor = 0, version = 0, updated_at = now()
     WHERE sink = %(sink)s AND NOT EXISTS (SELECT FROM truth WHERE truth.account_id = stored.account_id)
    RETURNING account_id, balance_minor
)
-- A statement does not see what it has written itself: `before` has the former values.
SELECT account_id::text, balance_minor - coalesce(former, 0) AS difference
  FROM (TABLE settled UNION ALL TABLE unknown) AS changed LEFT JOIN before USING (account_id)
 WHERE balance_minor <> coalesce(former, 0);
