# A prefill or decode worker. One image for both pools, so that both have the same code.
#   docker build -f deploy/docker/worker.Dockerfile -t tandem-worker:0.1.0 .
# torch brings CUDA's libraries; for machines without GPUs give a CPU build's index: --build-arg TORCH_INDEX=...
# For the same image every time name the base by its digest: --build-arg PYTHON=python:3.11-slim-bookworm@sha256:...
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ARG TORCH_INDEX=""
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 SOURCE_DATE_EPOCH=315532800 PATH=/venv/bin:$PATH
RUN python -m venv /venv && pip install "setuptools==84.2.1"
COPY deploy/docker/requirements-worker.lock requirements.lock /tmp/
RUN pip install --no-deps -r /tmp/requirements-worker.lock
# What it needs besides the lock is CUDA's, in versions that it names itself.
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' /tmp/requirements.lock)"
WORKDIR /app
COPY pyproject.toml README.md ./
COPY tandem tandem
COPY cli cli
COPY services services
COPY cluster cluster
COPY engine engine
COPY kvtransfer kvtransfer
COPY planner planner
COPY demo demo
# The operators for CPU of every level that the compiler knows: a worker loads what its processor has.
RUN pip install --no-deps --no-build-isolation -e . \
    && python -m compileall -q /app \
    && python -m engine.kernels.build --all

FROM ${PYTHON}
# g++: Triton compiles when it starts. The others are what UCX needs for RDMA.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /venv /venv
COPY --from=build /app /app
ENV PATH=/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /app
RUN useradd --uid 10001 --no-create-home --home-dir /cache tandem
USER 10001:10001
STOPSIGNAL SIGTERM
CMD ["tandem", "--help"]
