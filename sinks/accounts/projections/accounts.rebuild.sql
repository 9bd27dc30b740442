-- `outbox rebuild --from source`: set the accounts to those of the source.
--
-- `source` has the rows of the views that both aggregates name, as JSON; all that is wanted is in source_accounts. An
-- account that the source does not have keeps its label, and nothing else.
-- The last statement returns a row (key, difference) for each account whose turnover has changed.
WITH truth AS (
    SELECT (total ->> 'key')::uuid AS account_id, total ->> 'kind' AS kind, total ->> 'currency' AS currency,
           total ->> 'label' AS label, total ->> 'status' AS status, (total ->> 'version')::bigint AS version,
           (total ->> 'transfers')::bigint AS transfers, (total ->> 'turnover')::numeric AS turnover
      FROM source
     WHERE aggregate = 'account'
), before AS (
    SELECT account_id, turnover_minor AS former FROM accounts WHERE sink = %(sink)s
), settled AS (
    INSERT INTO accounts AS stored
           (sink, account_id, kind, currency, label, opened_version, status, version, transfers, turnover_minor)
    SELECT %(sink)s, account_id, kind, currency, label, version, status, version, transfers, turnover
      FROM truth
     ORDER BY account_id
    ON CONFLICT (sink, account_id) DO UPDATE
       SET kind = excluded.kind,
           currency = excluded.currency,
           label = excluded.label,
           opened_version = excluded.opened_version,
           status = excluded.status,
           version = excluded.version,
           transfers = excluded.transfers,
           turnover_minor = excluded.turnover_minor,
           updated_at = now()
    RETURNING account_id, turnover_minor
), unknown AS (
    UPDATE accounts AS stored
       SET opened_version = 0, status = NULL, version = 0, transfers = 0, turnover_minor = 0, updated_at = now()
     WHERE sink = %(sink)s AND NOT EXISTS (SELECT FROM truth WHERE truth.account_id = stored.account_id)
    RETURNING account_id, turnover_minor
)
-- A statement does not see what it has written itself: `before` has the former values.
SELECT account_id::text, turnover_minor - coalesce(former, 0) AS difference
  FROM (TABLE settled UNION ALL TABLE unknown) AS changed LEFT JOIN before USING (account_id)
 WHERE turnover_minor <> coalesce(former, 0);
