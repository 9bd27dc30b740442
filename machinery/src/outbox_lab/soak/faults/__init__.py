"""The faults: one table. The nemesis draws each row once before any comes again, and none that is impossible here.

A row says what it does, how it is injected and healed, which parts it breaks, what it needs beside them, and how long
it lasts. `outbox_lab.soak.nemesis.Fault` explains the columns.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial

from outbox_lab.soak.faults import operations, servers, sinks
from outbox_lab.soak.nemesis import Fault, Strike
from outbox_lab.soak.proxy import Proxy
from outbox_lab.soak.testbed import LINKS

A_WHILE, A_MOMENT = (2.0, 10.0), (2.0, 5.0)  # seconds
SESSION = (12.0, 20.0)  # longer than Connect's session timeout
LONG = (2.0, 70.0)  # maybe longer than clients of Kafka and of the databases wait (30 s), and a WAL sender (60 s)
DATABASE_AND_BROKER = ("postgres", "kafka")
READS = (*DATABASE_AND_BROKER, "sinks-kafka", "sinks-postgres")  # what sinks need to commit a batch
BATCHES = (*READS, "connect")  # and to get something to read
# Of faults of processes of sinks: what heals them, and what they break.
SINKS = (sinks.restart, ("sinks",))

# fmt: off
_TABLE = (
    # Servers
    *(Fault(f"{part}-killed", "SIGKILL: all its processes at once.",
            servers.kill, servers.restart, (part,), lasts_s=A_WHILE)
      for part in ("postgres", "kafka", "connect")),
    *(Fault(f"{part}-frozen",
            "SIGSTOP: it keeps connections and answers nothing; Connect for longer than its session timeout.",
            lambda strike: servers.stop_all(strike.server), servers.thaw, (part,),
            lasts_s=SESSION if part == "connect" else A_WHILE)
      for part in ("postgres", "kafka", "connect")),
    *(Fault(f"{part}-disk-failing",
            "Writes behind the first kilobytes of a file fail for a while, as on a failing disk.",
            servers.fail_writes, servers.allow_writes, (part,), lasts_s=A_WHILE,
            is_possible=lambda _: shutil.which("prlimit"))  # only Linux limits the files of a process that runs
      for part in ("postgres", "kafka")),

    # The relay
    Fault("replication-terminated",
          "`pg_terminate_backend` on the replication connection of each connector, several times.",
          servers.terminate_replication, servers.wait_running, ("connector",), ("connect", "postgres")),
    Fault("connect-zombie",
          "A worker is frozen until another worker has its task. Then it returns, and must be fenced.",
          servers.return_as_zombie, servers.end_second_worker, ("connect", "connector"),
          ("kafka", "connect-kafka", "postgres", "debezium-postgres"), (0.0, 2.0)),
    Fault("connect-rebalanced", "A second worker joins, the first leaves and returns: each task moves there and back.",
          servers.rebalance, servers.end_second_worker, ("connect", "connector"), ("kafka", "connect-kafka"), A_MOMENT),

    # The service
    Fault("service-killed-in-request", "SIGKILL to the service's workers while requests are in their transactions.",
          servers.kill_in_request, servers.restart_service, ("service",), ("postgres",)),
    Fault("service-killed-after-commit",
          "SIGKILL to the service's workers between a COMMIT and the answer to the client.",
          servers.kill_after_commit, servers.restart_service, ("service", "client-service"),
          ("postgres", "service-postgres")),
    Fault("ids-of-the-past", "The clock from which event ids are made goes back by an hour.",
          servers.set_clock_back, servers.make_ids, ("outbox-ids",), ("postgres",), A_WHILE),

    # Sinks
    Fault("sinks-killed", "SIGKILL at any moment: the driver, and the executors that are in its JVM.",
          sinks.kill, *SINKS, lasts_s=A_WHILE),
    Fault("sinks-frozen", "SIGSTOP to one process of them, maybe for longer than the database and Kafka wait.",
          sinks.freeze, *SINKS, lasts_s=LONG),
    Fault("sinks-spark-killed", "SIGKILL to the driver's JVM. The Python process must notice, and end.",
          sinks.kill_spark, *SINKS, lasts_s=A_WHILE, is_possible=sinks.on_spark),
    Fault("sinks-killed-between-commits", "SIGKILL after the commit to the sink database and before Spark's.",
          sinks.kill_between_commits, *SINKS, BATCHES, is_possible=sinks.with_two_commits),
    Fault("sinks-killed-before-commit",
          "SIGKILL once a batch has written everything, and before it is committed.",
          sinks.kill_before_commit, *SINKS, BATCHES),
    Fault("handlers-killed-in-call", "SIGKILL to a process of handlers while a function is being called.",
          sinks.kill_in_call, *SINKS, BATCHES, is_possible=lambda testbed: testbed.options.handlers),
    Fault("sinks-killed-in-topic", "SIGKILL to sinks that write to a topic, in the middle of their Kafka transaction.",
          sinks.kill_in_topic, sinks.restart, ("sinks", "sinks-kafka"),
          (*DATABASE_AND_BROKER, "sinks-postgres", "connect"),
          is_possible=lambda testbed: testbed.written_topics),
    Fault("sinks-killed-behind-topic", "SIGKILL to such sinks between the commit of Kafka and that of Postgres.",
          sinks.kill_behind_topic, sinks.restart, ("sinks", "sinks-postgres"),
          (*DATABASE_AND_BROKER, "sinks-kafka", "connect"),
          is_possible=lambda testbed: testbed.written_topics),
    Fault("sinks-engine-changed",
          "Sinks on Spark are restarted without Spark, or the other way, and later back again.",
          sinks.change_engine, *SINKS, BATCHES, A_WHILE, is_possible=sinks.on_either),
    Fault("sinks-zombie",
          "Sinks are frozen until another process has taken them over. They return, and must be refused.",
          sinks.return_as_zombie, *SINKS, BATCHES),
    Fault("checkpoint-deleted", "The whole checkpoint of a sink is deleted.",
          partial(sinks.damage_checkpoint, damage=sinks.delete), *SINKS, READS, is_possible=sinks.on_spark),
    Fault("checkpoint-truncated",
          "The last entry of one of Spark's logs is cut short, as by a host that lost its power.",
          partial(sinks.damage_checkpoint, damage=sinks.truncate), *SINKS, READS, is_possible=sinks.on_spark),
    Fault("sink-rewound", "`outbox rewind` to the beginning of the topics: every event is read again.",
          sinks.rewind, *SINKS, DATABASE_AND_BROKER),

    # Links
    *(Fault(f"{link}-{name}", summary, partial(servers.break_link, affect=affect, effect=effect), Strike.heal_links,
            (link,), lasts_s=lasts_s)
      for name, summary, affect, effect, lasts_s in (
          ("cut", "Every connection is closed, and new ones are refused.", Proxy.cut, "ended", A_WHILE),
          ("slow", "Each packet is 0.3 s late.", lambda proxy: proxy.delay(0.3), "chunks delayed", A_WHILE),
          ("half-open", "Connections stay and begin, and no byte passes, sometimes for longer than clients wait.",
           Proxy.hold, "chunks held", LONG))
      for link in LINKS),

    # Operations of people
    Fault("prune", "`outbox prune --keep-hours 0`, beside everything.", operations.prune),
    Fault("check-incremental", "`outbox check --incremental --json`, beside everything.", operations.check),
    Fault("connect-apply", "`outbox connect apply` of each connector, beside everything.",
          operations.apply_connectors),
    *(Fault(f"rebuild-from-{source}",
            f"`outbox rebuild SINK --from {source}` of a sink that recognises every repeat, while it runs.",
            partial(operations.rebuild, source=source), parts=("sinks",), needs=DATABASE_AND_BROKER,
            is_possible=partial(operations.rebuildable, source=source))
      for source in ("topic", "source")),
    Fault("letters-become-valid", "A sink refuses valid events for a while. Then their dead letters are replayed.",
          operations.refuse_events, operations.accept_events, (), ("sinks", "postgres"), A_MOMENT,
          is_possible=operations.refusing),
    Fault("replay-letters", "`outbox dead-letters replay --all`, beside everything.", operations.replay_letters),

    # Hostile records
    *(Fault(f"records-{name}", summary, partial(operations.send, make=make), operations.discard_letters,
            needs=("kafka",))
      for name, summary, make in (
          ("foreign", "Records of another program on our topics, without our headers.", operations.foreign_records),
          ("malformed", "Records with our headers, and a value that breaks the contract.",
           operations.malformed_records),
          ("huge", "Records of almost a megabyte.", operations.huge_records),
          ("of-decades", "Events with ids that are older than sinks take, and with ids of the future.",
           operations.records_of_decades))),
    # Their letters stay open: to discard one would give up the event whose id it has.
    Fault("records-with-used-ids", "Records with the id of a real event and a value that breaks the contract.",
          partial(operations.send, make=operations.records_with_used_ids), needs=DATABASE_AND_BROKER),
)
# fmt: on
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _TABLE}
