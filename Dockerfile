# Two images: `outbox` is everything of ours, `connect` is Kafka Connect with Debezium in its plugin folder.

FROM python:3.11-slim-bookworm AS python
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openjdk-17-jre-headless \
    && rm -rf /var/lib/apt/lists/*
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 XDG_CACHE_HOME=/opt/cache
WORKDIR /opt/outbox
COPY requirements.txt .
# The one lock of the project, so what is tested is what runs.
RUN pip install --no-cache-dir --require-hashes --requirement requirements.txt


# The JVM parts, from the few files that say which: a change elsewhere downloads nothing.
FROM python AS jars
ARG OUTBOX_MAVEN_MIRROR
COPY outbox/__init__.py outbox/
COPY outbox/base outbox/base
COPY outbox/jvm outbox/jvm
RUN cp --recursive "$(python -m outbox.jvm.jars plugin)" /opt/plugin


FROM apache/kafka:4.3.1 AS connect
# connect/worker.properties names the folder `plugins` in the working directory.
WORKDIR /opt/outbox
COPY --from=jars /opt/plugin plugins


FROM python AS outbox
COPY --from=jars /opt/cache /opt/cache
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable .
# A named volume takes owner and mode of the folder that it is mounted on. 1000 is also the user of the image apache/kafka
# (the first that adduser makes), who reads stack.env as its owner.
RUN useradd --uid 1000 --create-home outbox \
    && install --directory --owner=outbox --group=outbox --mode=700 \
        /var/lib/secrets /var/lib/outbox /var/lib/outbox/checkpoints \
    && ln --symbolic /var/lib/secrets/stack.env /var/lib/outbox/stack.env
USER outbox
# Spark makes folders where it is started.
WORKDIR /home/outbox
