# syntax=docker/dockerfile:1
# CPU:  docker build -t outrider:0.1.0 --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# CUDA: docker build -t outrider:0.1.0-cuda --build-arg VARIANT=cuda .
# PyTorch's and vLLM's wheels bring CUDA's libraries, the node brings the driver: no CUDA base image is needed.
ARG PYTHON_VERSION=3.11
ARG VARIANT=cpu

FROM python:${PYTHON_VERSION}-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

FROM base AS build
ARG VARIANT
# An index that is asked besides the default one: PyTorch's CPU wheels are a tenth of the size of the CUDA ones.
ARG TORCH_INDEX=
WORKDIR /opt/outrider
# What decides the dependencies and nothing else, so that a change of code does not install them again.
COPY pyproject.toml constraints.txt ./
COPY k8s/image/ k8s/image/
RUN bash k8s/image/install.sh /opt/venv "${VARIANT}" "${TORCH_INDEX}"

FROM base AS runtime-cpu

FROM base AS runtime-cuda
# Triton compiles its launchers on first use; any compiler of this Debian will do.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# One of the two stages above, which have their tag from `base`.
# hadolint ignore=DL3006
FROM runtime-${VARIANT} AS runtime
# The user of the pods' security contexts. Bash stays: the operator starts Ray through it.
RUN groupadd --gid 10001 outrider \
    && useradd --uid 10001 --gid 10001 --create-home --home-dir /home/outrider outrider
COPY --from=build /opt/venv /opt/venv
WORKDIR /opt/outrider
COPY actors/ actors/
COPY cluster/ cluster/
COPY deployments/ deployments/
# Compiled now: the root is read-only later. PYTHONPATH makes `actors`, `cluster` and `deployments` these ones, in
# the controller, in replicas and in every Ray worker alike.
RUN /opt/venv/bin/python -m compileall -q actors cluster deployments
# Two arenas of glibc's allocator: the many threads of Ray's processes would each keep what another one has freed.
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/opt/outrider PYTHONDONTWRITEBYTECODE=1 MALLOC_ARENA_MAX=2
USER 10001:10001
EXPOSE 8000
CMD ["outrider", "--help"]
