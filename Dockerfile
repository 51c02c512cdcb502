# The service with its embedded executor and the demo model. The default includes CUDA; for a
# CPU-only image give PyTorch's own index and its CPU build:
#   docker build --build-arg INDEX=URL --build-arg TORCH=torch==2.13.0+cpu .
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
ARG TORCH=torch==2.13.0
ARG INDEX=
ENV PIP_EXTRA_INDEX_URL=$INDEX
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN python -m venv /opt/penstock \
    && /opt/penstock/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /tmp/wheels . \
    && /opt/penstock/bin/pip install --no-cache-dir "${TORCH}" "$(ls /tmp/wheels/penstock-*.whl)[torch]"

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
