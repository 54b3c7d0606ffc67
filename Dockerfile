# syntax=docker/dockerfile:1
#
#   docker build --target cpu -t pagewalk:cpu .
#   docker build --target gpu -t pagewalk:gpu .
#   docker build --target router -t pagewalk:router .      the load balancer of compose.yaml's profile scale
#
# The first two run as uid 10001, write to /cache (models, compiled kernels) and /tmp only, and listen on port 8000. What they install
# is in deploy/locks/, with the hash of every file (make locks); PYTHON_IMAGE takes a digest too (python@sha256:...).

ARG PYTHON_VERSION=3.11
ARG PYTHON_IMAGE=python:${PYTHON_VERSION}-slim

# ---- what both builds share: a venv, and what builds the project's wheel
FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_REQUIRE_VIRTUALENV=1
RUN python3 -m venv /opt/pagewalk
ENV PATH=/opt/pagewalk/bin:$PATH
WORKDIR /src
COPY deploy/locks/ locks/
RUN pip install --require-hashes -r locks/build.txt

# The packages come before the sources: a change of ours leaves their layer as it was.
FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --require-hashes --extra-index-url "${TORCH_INDEX}" -r locks/cpu.txt
COPY . .
RUN pip install --no-deps --no-build-isolation . && pip uninstall -y setuptools

FROM build AS build-gpu
RUN pip install --require-hashes -r locks/gpu.txt
COPY . .
RUN pip install --no-deps --no-build-isolation . && pip uninstall -y setuptools

# ---- what runs: no sources; on a GPU no compiler either (NVRTC is a library). pip stays: it fetches the demo model
FROM ${PYTHON_IMAGE} AS run
RUN useradd --uid 10001 --create-home --home-dir /home/pagewalk pagewalk \
    && install -d -o pagewalk -g pagewalk /cache
ENV PATH=/opt/pagewalk/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/cache/huggingface \
    PAGEWALK_CACHE=/cache/pagewalk \
    PAGEWALK_HOST=0.0.0.0 \
    PAGEWALK_PORT=8000
COPY deploy/is_live.py /usr/local/lib/pagewalk/is_live.py
USER 10001
WORKDIR /home/pagewalk
EXPOSE 8000
VOLUME ["/cache"]
# /live: 200 from the first moment, also while a large model loads; 503 when only a restart helps.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python3", "/usr/local/lib/pagewalk/is_live.py"]
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

# ---- not ours: a router that knows which replica has which prefixes
FROM build AS build-router
RUN pip install --require-hashes -r locks/router.txt && pip uninstall -y setuptools pip

FROM ${PYTHON_IMAGE} AS router
RUN useradd --uid 10001 --create-home --home-dir /home/router router
COPY --from=build-router /opt/pagewalk /opt/pagewalk
ENV PATH=/opt/pagewalk/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER 10001
WORKDIR /home/router
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["python3", "-m", "vllm_router.launch_router", "--host", "0.0.0.0", "--port", "8080", "--prometheus-host", "0.0.0.0", "--prometheus-port", "29000"]
