-- The balance of each account is the sum of its events. Their order does not matter.
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
SELECT %(sink)s, account_id, min(currency), sum(amount), max(version), count(*)
  FROM new_events
 GROUP BY account_id
 ORDER BY account_id
ON CONFLICT (sink, account_id) DO UPDATE
   SET balance_minor = stored.balance_minor + excluded.balance_minor,
       version = greatest(stored.version, excluded.version),
       events = stored.events + excluded.events,
       updated_at = now();
