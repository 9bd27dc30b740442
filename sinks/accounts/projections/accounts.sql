-- Each account: how it was opened, its status, and what its transfers come to.
--
-- A batch is of one topic, and either topic may be ahead of the other. So each statement makes the row or completes it,
-- and none depends on what another has found. A replayed dead letter may come after younger events: the version of the
-- account's life says which opening and which status are the newest.
INSERT INTO accounts AS stored (sink, account_id, kind, currency, label, opened_version)
SELECT DISTINCT ON (account_id) %(sink)s, account_id, kind, currency, label, version
  FROM new_account_opened
 ORDER BY account_id, version DESC
ON CONFLICT (sink, account_id) DO UPDATE
   SET kind = excluded.kind,
       currency = excluded.currency,
       label = excluded.label,
       opened_version = excluded.opened_version,
       updated_at = now()
 WHERE excluded.opened_version > stored.opened_version;

INSERT INTO accounts AS stored (sink, account_id, status, version)
SELECT DISTINCT ON (account_id) %(sink)s, account_id, status, version
  FROM (SELECT account_id, 'open' AS status, version FROM new_account_opened
        UNION ALL
        SELECT account_id, 'frozen', version FROM new_account_frozen
        UNION ALL
        SELECT account_id, 'closed', version FROM new_account_closed) AS change
 ORDER BY account_id, version DESC
ON CONFLICT (sink, account_id) DO UPDATE
   SET status = excluded.status,
       version = excluded.version,
       updated_at = now()
 WHERE excluded.version > stored.version;

-- numeric, because the amount of a debit may be -2^63, of which a bigint cannot hold the opposite.
INSERT INTO accounts AS stored (sink, account_id, transfers, turnover_minor)
SELECT %(sink)s, account_id, count(*), sum(abs(amount::numeric))
  FROM (SELECT account_id, amount FROM new_balance_debited
        UNION ALL
        SELECT account_id, amount FROM new_balance_credited) AS change
 GROUP BY account_id
 ORDER BY account_id
ON CONFLICT (sink, account_id) DO UPDATE
   SET transfers = stored.transfers + excluded.transfers,
       turnover_minor = stored.turnover_minor + excluded.turnover_minor,
       updated_at = now();
