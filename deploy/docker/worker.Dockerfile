# A prefill or decode worker, Ray, and `tandem up`. One image for both pools, so that both have the same code.
#   docker build -f deploy/docker/worker.Dockerfile -t tandem-worker:0.1.0 .                           CUDA 13
#   docker build -f deploy/docker/worker.Dockerfile --build-arg DEVICE=cpu -t tandem-worker:0.1.0-cpu .
# DEVICE is a lock beside this file: which torch, and for CUDA its libraries, which are wheels: no CUDA base is needed.
# torch's CPU build is not on PyPI: name an index that has it with --build-arg TORCH_INDEX=... or in pip.conf.
# The base is any Debian with Python 3.11 and its venv; for the same image every time name it by its digest:
#   --build-arg PYTHON=python:3.11-slim-bookworm@sha256:...
# pip and apt of another network: --secret id=pip,src=pip.conf --secret id=apt,src=apt.conf. Neither is in the image.
ARG PYTHON=python:3.11-slim-bookworm
ARG DEVICE=cuda13

FROM ${PYTHON} AS build
ARG TORCH_INDEX=""
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/zz-build \
    apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 SOURCE_DATE_EPOCH=315532800 PATH=/venv/bin:$PATH
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /venv && pip install "setuptools==84.2.1"
COPY deploy/docker/requirements-worker.lock /tmp/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-deps -r /tmp/requirements-worker.lock
ARG DEVICE
COPY deploy/docker/requirements-cpu.lock deploy/docker/requirements-cuda13.lock /tmp/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r "/tmp/requirements-$DEVICE.lock"
WORKDIR /app
# The operators for CPU of every level that the compiler knows: a worker loads what its processor has. Before the rest,
# which changes more often; pyproject.toml says that the libraries belong beside their sources, and comes with the rest.
COPY engine/kernels engine/kernels
RUN touch pyproject.toml && python -P engine/kernels/build.py --all
COPY pyproject.toml README.md ./
COPY tandem tandem
COPY cli cli
COPY services services
COPY cluster cluster
COPY engine engine
COPY kvtransfer kvtransfer
COPY planner planner
COPY demo demo
RUN pip install --no-deps --no-build-isolation -e . \
    && python -m compileall -q /app \
    && python -c "import cli.main, cluster.supervision.supervisor, services.decode.servicer, services.prefill.servicer"

FROM ${PYTHON}
ARG DEVICE
# What UCX needs for RDMA; for CUDA also g++, with which Triton compiles when it starts, and Python.h if the base has none.
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/zz-build \
    apt-get update \
    && apt-get install -y --no-install-recommends ibverbs-providers libibverbs1 librdmacm1 \
        $(case "$DEVICE" in cuda*) \
            echo g++; test -e "$(python3 -c 'from sysconfig import *; print(get_path("include"))')/Python.h" \
                || echo python3-dev ;; \
        esac) \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /venv /venv
COPY --from=build /app /app
ENV PATH=/venv/bin:$PATH HOME=/cache PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /app
# The two folders where a process writes besides /tmp; volumes that are new take the owner from here.
RUN useradd --uid 10001 --create-home --home-dir /cache tandem && install -d -o 10001 -g 10001 /models
USER 10001:10001
STOPSIGNAL SIGTERM
CMD ["tandem", "--help"]
