-- The balance of each account: the sum of its events. Additive, so the order of the events does not matter.
--
-- An account keeps the currency it has, or gets that of its earliest event. Events in another one are left out, and go
-- to `rejected`, which the engine keeps as dead letters.
--
-- A balance that was taken from the ledger has the account's events up to `base_version` in it (balances.rebuild.sql).
-- Whatever the strategy thinks of them, they are not new.
DELETE FROM fresh USING balances AS stored
 WHERE stored.sink = %(sink)s AND stored.account_id = fresh.account_id AND fresh.version <= stored.base_version;

WITH change AS (
    SELECT account_id, currency, sum(amount) AS amount, count(*) AS events, min(version) AS earliest, max(version) AS version
      FROM fresh
     GROUP BY account_id, currency
), chosen AS (
    SELECT DISTINCT ON (change.account_id) change.*
      FROM change
      LEFT JOIN balances AS stored ON stored.sink = %(sink)s AND stored.account_id = change.account_id
     ORDER BY change.account_id, stored.currency = change.currency DESC NULLS LAST, earliest
), settled AS (
    INSERT INTO balances AS stored (sink, account_id, currency, balance_minor, version, events)
    SELECT %(sink)s, account_id, currency, amount, version, events FROM chosen ORDER BY account_id
    ON CONFLICT (sink, account_id) DO UPDATE
       SET balance_minor = stored.balance_minor + excluded.balance_minor,
           version = greatest(stored.version, excluded.version),
           events = stored.events + excluded.events,
           updated_at = now()
     WHERE stored.currency = excluded.currency
    RETURNING account_id, currency
)
INSERT INTO rejected (event_id, reason, detail)
SELECT event_id, 'currency mismatch', format('the account is not in %%s', currency)
  FROM fresh
 WHERE NOT EXISTS (SELECT FROM settled
                    WHERE settled.account_id = fresh.account_id AND settled.currency = fresh.currency);
