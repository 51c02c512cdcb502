# The service with its embedded executor and the demo model. Installs the CPU build of torch where
# the index offers it, e.g. PyTorch's CPU index, else what it offers: the public index, CUDA.
#   docker build --build-arg INDEX=URL .
# TORCH chooses a build: --build-arg TORCH=torch==2.13.0+cu130.
FROM python:3.12-slim AS build
# Compiles the CPU kernels.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md hatch_build.py ./
COPY protos protos
COPY scheduler scheduler
COPY executors executors
COPY server server
COPY clients clients
COPY tools tools
COPY gateways gateways
COPY deploy/torch_requirement.sh deploy/
ARG TORCH=
ARG INDEX=
ENV PIP_EXTRA_INDEX_URL=$INDEX
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN python -m venv /opt/penstock \
    && /opt/penstock/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /tmp/wheels . \
    && /opt/penstock/bin/pip install --no-cache-dir \
        "${TORCH:-$(deploy/torch_requirement.sh /opt/penstock/bin/python)}" "$(ls /tmp/wheels/penstock-*.whl)[torch]"

FROM python:3.12-slim
RUN useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin penstock
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
EXPOSE 50051
# Ready in seconds with the demo model; large weights take longer.
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 CMD ["penstock", "health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["penstock"]
# All addresses of the container: publish only the ports that callers need. docs/security.md
# describes authentication.
CMD ["serve", "--host", "0.0.0.0", "--allow-anonymous-network", "on"]
