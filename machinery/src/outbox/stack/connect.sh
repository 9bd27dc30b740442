# The entry point of the container `connect`.
set -ea

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
. /run/secrets/stack.env
exec /opt/kafka/bin/connect-distributed.sh /etc/outbox/worker.properties
