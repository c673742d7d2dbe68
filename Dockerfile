# syntax=docker/dockerfile:1
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive \
    PYTHONUNBUFFERED=1 \
    UV_LINK_MODE=copy \
    HF_HOME=/cache/huggingface \
    HF_XET_HIGH_PERFORMANCE=1

RUN apt-get update \
 && apt-get install -y --no-install-recommends build-essential git python3.12 python3.12-dev python3.12-venv \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY requirements.txt .
RUN python3.12 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir uv \
 && /opt/uv/bin/uv venv --python 3.12 /opt/venv \
 && /opt/uv/bin/uv pip install --no-cache --python /opt/venv/bin/python -r requirements.txt
ENV PATH=/opt/venv/bin:$PATH

COPY . .
VOLUME /cache
ENTRYPOINT ["python", "worker.py"]
