# syntax=docker/dockerfile:1
# CUDA 13: the machine's driver is 580 or newer. `devel`, as Triton and vLLM compile kernels when they start.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive \
    PYTHONUNBUFFERED=1 \
    UV_LINK_MODE=copy \
    HF_HOME=/cache/huggingface \
    HF_XET_HIGH_PERFORMANCE=1 \
    AUTOSLM_STORE_DIR=/cache/artifacts

RUN apt-get update \
 && apt-get install -y --no-install-recommends \
      build-essential ca-certificates git python3.12 python3.12-dev python3.12-venv \
 && rm -rf /var/lib/apt/lists/*

# Dependencies before code: a change of the worker rebuilds the last layers only.
WORKDIR /app
COPY requirements.txt .
RUN python3.12 -m venv /opt/uv \
 && /opt/uv/bin/pip install --no-cache-dir uv==0.13.9 \
 && /opt/uv/bin/uv venv --python 3.12 /opt/venv \
 && /opt/uv/bin/uv pip install --no-cache --python /opt/venv/bin/python -r requirements.txt
ENV PATH=/opt/venv/bin:/opt/uv/bin:$PATH \
    VIRTUAL_ENV=/opt/venv

# An account without rights, for `docker run --user worker` or a build with RUN_AS=worker; the default is
# root, as most hosts' volumes belong to it.
ARG RUN_AS=root
RUN useradd --create-home --uid 10001 worker \
 && mkdir -p /cache/huggingface /cache/artifacts \
 && chown -R worker:worker /cache

COPY . .

ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="slm-worker" \
      org.opencontainers.image.description="Fine-tune a LoRA adapter on one rented GPU: SFT or GRPO" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"

VOLUME /cache
USER $RUN_AS
# No shell in between: the worker is process 1 and gets the signals of a machine that is taken away.
ENTRYPOINT ["python", "worker.py"]
