# syntax=docker/dockerfile:1
#
#   docker build --target cpu -t pagewalk:cpu .
#   docker build --target gpu -t pagewalk:gpu .
#
# Both run as uid 10001, write to /cache (models) and /tmp only, and listen on port 8000.

ARG PYTHON_VERSION=3.12

# ---- what both builds share: a venv with everything but torch, made from the pins
FROM python:${PYTHON_VERSION}-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/pagewalk
ENV PATH=/opt/pagewalk/bin:$PATH
WORKDIR /src
COPY constraints.txt ./

FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --index-url "${TORCH_INDEX}" "$(grep '^torch==' constraints.txt)"
COPY . .
RUN pip install -c constraints.txt .

FROM build AS build-gpu
RUN pip install "$(grep '^torch==' constraints.txt)"
COPY . .
RUN pip install -c constraints.txt ".[cuda]"

# ---- what runs: no sources; on a GPU no compiler either (NVRTC is a library)
FROM python:${PYTHON_VERSION}-slim AS run
RUN useradd --uid 10001 --create-home --home-dir /home/pagewalk pagewalk \
    && install -d -o pagewalk -g pagewalk /cache
ENV PATH=/opt/pagewalk/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/cache/huggingface \
    PAGEWALK_CACHE=/cache/pagewalk \
    PAGEWALK_HOST=0.0.0.0 \
    PAGEWALK_PORT=8000
USER 10001
WORKDIR /home/pagewalk
EXPOSE 8000
VOLUME ["/cache"]
# /live: 200 from the first moment, also while a large model loads; 503 when only a restart helps.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"PAGEWALK_PORT\"]}/live', timeout=4)"]
ENTRYPOINT ["pagewalk"]
CMD ["serve"]

# The CPU kernels are compiled at the first start, for the processor that is there, and kept in /cache.
FROM run AS cpu
USER 0
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
USER 10001
ENV PAGEWALK_DEVICE=cpu
COPY --from=build-cpu /opt/pagewalk /opt/pagewalk

FROM run AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-gpu /opt/pagewalk /opt/pagewalk
