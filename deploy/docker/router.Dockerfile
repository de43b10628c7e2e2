# The router, the `tandem` command and what fetches models: no torch, no compiler.
#   docker build -f deploy/docker/router.Dockerfile -t tandem-router:0.1.0 .
# The base is any Debian with Python 3.11 and its venv; for the same image every time name it by its digest:
#   --build-arg PYTHON=python:3.11-slim-bookworm@sha256:...
# pip and apt of another network: --secret id=pip,src=pip.conf --secret id=apt,src=apt.conf. Neither is in the image.
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 SOURCE_DATE_EPOCH=315532800 PATH=/venv/bin:$PATH
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /venv && pip install "setuptools==84.2.1"
COPY deploy/docker/requirements-router.lock /tmp/requirements.lock
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-deps -r /tmp/requirements.lock
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
    && python -m compileall -q /app \
    && python -c "import cli.main, services.router.server"

FROM ${PYTHON}
COPY --from=build /venv /venv
COPY --from=build /app /app
ENV PATH=/venv/bin:$PATH HOME=/cache PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /app
# The two folders where a process writes besides /tmp; volumes that are new take the owner from here.
RUN useradd --uid 10001 --create-home --home-dir /cache tandem && install -d -o 10001 -g 10001 /models
USER 10001:10001
STOPSIGNAL SIGTERM
CMD ["tandem", "--help"]
