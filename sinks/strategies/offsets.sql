-- idea: new is what lies at or above the position that this sink committed with its last batch
-- survives: re-reads of the topic; not an event that is sent again, which has another offset
-- costs: nothing: the positions are kept anyway
-- choose: only for a topic that never repeats an event: no worker without exactly-once, no outbox sent a second time
-- knows: positions
--
-- The position is read and moved in the transaction of the balances, and it is where a sink without checkpoint begins.
INSERT INTO fresh
SELECT staged.*
  FROM staged
  LEFT JOIN positions ON positions.sink = %(sink)s AND positions.topic = %(topic)s
                     AND positions.partition = staged.partition
 WHERE staged."offset" >= coalesce(positions.next_offset, 0);
