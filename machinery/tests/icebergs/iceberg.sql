-- idea: insert events into an Iceberg table, by MERGE on event_id
-- survives: every duplicate: in a batch, across batches and restarts, resent under another offset
-- costs: the whole event, stored for good
-- choose: never; it is here so that the machinery is tested with an Iceberg table
-- memory: none
MERGE INTO events AS known
USING (
    SELECT * EXCEPT (outbox_copy),
           -- From the id, not from the arrival: a duplicate has the same day as its first copy.
           to_date(timestamp_millis(CAST(conv(substr(replace(event_id, '-', ''), 1, 12), 16, 10) AS BIGINT)))
               AS outbox_day
      FROM (SELECT *, row_number() OVER (PARTITION BY event_id ORDER BY partition, offset) AS outbox_copy FROM batch)
     WHERE outbox_copy = 1
) AS incoming
   ON known.event_id = incoming.event_id
  AND known.outbox_day = incoming.outbox_day
  -- These bound the search, however many years the table has: only the days of the batch's ids, and only files that
  -- hold ids of its range.
  AND known.outbox_day IN (%(days)s)
  AND known.event_id BETWEEN %(first_id)s AND %(last_id)s
 -- Never true. With this clause Iceberg refuses the commit if another one has added such rows meanwhile.
 WHEN MATCHED AND FALSE THEN DELETE
 WHEN NOT MATCHED THEN INSERT *
