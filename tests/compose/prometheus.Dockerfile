# Debian's build of Prometheus: stands in for prom/prometheus where no container registry is within reach.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends prometheus \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=nobody --group=nogroup /prometheus
USER 65534:65534
ENTRYPOINT ["/usr/bin/prometheus"]
