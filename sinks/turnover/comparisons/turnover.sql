-- The turnover of each currency, in its own minor units: the source has no rates. It is compared when the sink has
-- applied every event. The source counts a transfer at both of its accounts.
--
-- [source]
SELECT currency AS key, sum(turnover) / 2 AS total FROM source_accounts GROUP BY currency HAVING sum(turnover) > 0;

-- [sink]
SELECT sink, currency AS key, sum(amount_minor) AS total FROM turnover GROUP BY sink, currency;
