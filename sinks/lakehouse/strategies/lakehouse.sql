-- idea: land events in a Delta table, by MERGE on event_id; balances are a query over it
-- survives: every duplicate: in a batch, across batches and restarts, sent again under another offset
-- costs: the whole event, stored for good; about a second a batch, a file and an entry of the table's log
-- choose: when the events are wanted in a warehouse, where DuckDB, Trino or Spark read them
MERGE INTO events AS known
USING (
    SELECT * EXCEPT (copy),
           -- From the id, never from arrival: a duplicate has the day of its first.
           to_date(timestamp_millis(CAST(conv(substr(replace(event_id, '-', ''), 1, 12), 16, 10) AS BIGINT))) AS event_day
      FROM (SELECT *, row_number() OVER (PARTITION BY event_id ORDER BY partition, offset) AS copy FROM batch)
     WHERE copy = 1
) AS incoming
   ON known.event_id = incoming.event_id
  AND known.event_day = incoming.event_day
  -- What bounds the search, however many years there are: the days of the batch's ids, and within them the files
  -- that hold ids of its range.
  AND known.event_day IN (%(days)s)
  AND known.event_id BETWEEN %(first_id)s AND %(last_id)s
 WHEN NOT MATCHED THEN INSERT *
