-- How many copies of each book are lent: a sum, so the order of the events does not matter.
INSERT INTO books_lent AS stored (sink, isbn, lent)
SELECT %(sink)s, isbn, sum(CASE event_type WHEN 'book.lent' THEN 1 ELSE -1 END)
  FROM new_events
 GROUP BY isbn
 ORDER BY isbn -- one order for all writers: no deadlocks
ON CONFLICT (sink, isbn) DO UPDATE SET lent = stored.lent + excluded.lent;
