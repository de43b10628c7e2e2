# The router, the `tandem` command and what fetches models: no torch, no compiler.
#   docker build -f deploy/docker/router.Dockerfile -t tandem-router:0.1.0 .
# For the same image every time name the base by its digest: --build-arg PYTHON=python:3.11-slim-bookworm@sha256:...
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 SOURCE_DATE_EPOCH=315532800 PATH=/venv/bin:$PATH
RUN python -m venv /venv && pip install "setuptools==84.2.1"
COPY deploy/docker/requirements-router.lock /tmp/requirements.lock
RUN pip install --no-deps -r /tmp/requirements.lock
WORKDIR /app
COPY pyproject.toml README.md ./
COPY tandem tandem
COPY cli cli
COPY services services
COPY cluster cluster
COPY planner planner
COPY engine/__init__.py engine/
COPY engine/core engine/core
COPY demo demo
RUN pip install --no-deps --no-build-isolation -e . \
    && python -m compileall -q /app

FROM ${PYTHON}
COPY --from=build /venv /venv
COPY --from=build /app /app
ENV PATH=/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /app
RUN useradd --uid 10001 --no-create-home --home-dir /cache tandem
USER 10001:10001
STOPSIGNAL SIGTERM
CMD ["tandem", "--help"]
