# The shim on top of SGLang's own image; none of its packages is changed.
#
#   docker build -f deploy/docker/sglang.Dockerfile -t sglang-speculation:0.5.23-0.1.0 .
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
FROM python:3.11.13-slim-bookworm AS build
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

# hadolint ignore=DL3006
FROM ${SGLANG_IMAGE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# What is installed already is a constraint: pip adds what is missing, or fails.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip freeze --exclude-editable | sed '/ @ /d' > /run/installed.txt && \
    pip install --no-cache-dir -c /run/installed.txt "$(ls /wheels/*.whl)[engine]" && \
    rm /run/installed.txt
USER 10002:10002
