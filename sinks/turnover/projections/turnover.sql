-- The turnover of each day by currency, and what it comes to in euro cents. The columns are those of in_euros.
--
-- An event without a rate becomes a dead letter: its money is not counted, and not forgotten. When rates.csv has the
-- currency, `outbox dead-letters replay` counts it.
--
-- [refuse]
INSERT INTO rejections (event_id, reason, detail)
SELECT event_id, 'no rate', 'rates.csv has no rate for ' || currency
  FROM new_balance_credited
 WHERE euro_cents IS NULL;

-- [apply]
INSERT INTO turnover AS stored (sink, day, region, currency, transfers, amount_minor, euro_cents)
SELECT %(sink)s, day, region, currency, count(*), sum(amount), sum(euro_cents)
  FROM new_balance_credited
 GROUP BY day, region, currency
 ORDER BY day, region, currency -- one order for all writers: no deadlocks
ON CONFLICT (sink, day, region, currency) DO UPDATE
   SET transfers = stored.transfers + excluded.transfers,
       amount_minor = stored.amount_minor + excluded.amount_minor,
       euro_cents = stored.euro_cents + excluded.euro_cents;
