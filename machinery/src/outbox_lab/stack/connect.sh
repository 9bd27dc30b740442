# The entry point of the container `connect`, and with an argument its health check. No command line has a secret: the
# sinks see those.
set -ea
. /run/secrets/stack.env

if [ $# -gt 0 ]; then
  # The root answers before the worker has joined its group; the list of connectors does not.
  exec 3<> "/dev/tcp/connect-rest/8083"
  login=$(printf %s "$OUTBOX_CONNECT_USERNAME:$OUTBOX_CONNECT_PASSWORD" | base64 -w 0)
  printf 'GET /connectors HTTP/1.0\r\nAuthorization: Basic %s\r\n\r\n' "$login" >&3
  read -r -t 8 _ status _ <&3
  [ "$status" = 200 ]
  exit
fi

# The walkthrough switches exactly-once. Its word counts as long as it runs: a walkthrough that was killed changes nothing.
if read -r walkthrough mode 2>/dev/null < /run/walkthrough/exactly-once && grep -q demo "/proc/$walkthrough/cmdline"; then
  OUTBOX_EXACTLY_ONCE=$mode
fi
case "$OUTBOX_EXACTLY_ONCE" in
  true) OUTBOX_CONNECT_EXACTLY_ONCE=enabled ;;
  false) OUTBOX_CONNECT_EXACTLY_ONCE=disabled ;;
  *)
    echo "OUTBOX_EXACTLY_ONCE is $OUTBOX_EXACTLY_ONCE and must be true or false" >&2
    exit 2
    ;;
esac

OUTBOX_CONNECT_FETCH_MAX_WAIT_MS=$((4 * ${OUTBOX_CONNECTOR_POLL_INTERVAL_MS:-5}))

umask 077
cd /tmp
auth=org.apache.kafka.connect.rest.basic.auth.extension
echo "$OUTBOX_CONNECT_USERNAME=$OUTBOX_CONNECT_PASSWORD" > users.properties
echo "KafkaConnect { $auth.PropertyFileLoginModule required file=\"/tmp/users.properties\"; };" > jaas.conf
{
  cat /etc/outbox/worker.properties
  echo "rest.extension.classes=$auth.BasicAuthSecurityRestExtension"
} > worker.properties
# Debezium's driver finds its password by the server's address. In the environment a connector could refer to it.
printf 'postgres:5432:*:*:%s\n' "${OUTBOX_SOURCE_DB_CDC_PASSWORD//:/\\:}" > pgpass
PGPASSFILE=/tmp/pgpass
unset OUTBOX_CONNECT_PASSWORD OUTBOX_SOURCE_DB_CDC_PASSWORD
KAFKA_OPTS="$KAFKA_OPTS -Djava.security.auth.login.config=/tmp/jaas.conf"
KAFKA_OPTS="$KAFKA_OPTS -Dorg.apache.kafka.automatic.config.providers=org.apache.kafka.common.config.provider.EnvVarConfigProvider"
cd "$OLDPWD"
exec /opt/kafka/bin/connect-distributed.sh /tmp/worker.properties
