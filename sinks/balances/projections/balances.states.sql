-- The balance of each account, as its newest event states it. Strategies that take states use this file.
--
-- [refuse]
-- An account keeps the currency of its first event. Events in another currency are refused.
INSERT INTO rejections (event_id, reason, detail)
SELECT new_events.event_id, 'currency mismatch', format('the account is in %%s', home.currency)
  FROM new_events
  JOIN (SELECT DISTINCT ON (event.account_id) event.account_id, coalesce(stored.currency, event.currency) AS currency
          FROM new_events AS event
          LEFT JOIN balances AS stored ON stored.sink = %(sink)s AND stored.account_id = event.account_id
         ORDER BY event.account_id, event.version) AS home USING (account_id)
 WHERE new_events.currency <> home.currency;

-- [apply]
INSERT INTO balances AS stored (sink, account_id, currency, balance_minor, version, events)
SELECT DISTINCT ON (account_id)
       %(sink)s, account_id, currency, balance_after, version, count(*) OVER (PARTITION BY account_id)
  FROM new_events
 ORDER BY account_id, version DESC
ON CONFLICT (sink, account_id) DO UPDATE
   SET balance_minor = excluded.balance_minor,
       version = excluded.version,
       events = stored.events + excluded.events,
       updated_at = now()
 WHERE excluded.version > stored.version;
