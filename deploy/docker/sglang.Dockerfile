# Shim and trainer on top of SGLang's own image; none of its packages is changed.
#
#   docker build -f deploy/docker/sglang.Dockerfile -t sglang-speculation:0.5.23-0.1.0 .
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
FROM python:3.11.13-slim-bookworm AS build
COPY . /source
RUN pip install --no-cache-dir --require-hashes --only-binary :all: -r /source/requirements/lock/build.txt && \
    pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels \
        /source/engine_shim /source/trainer

# hadolint ignore=DL3006
FROM ${SGLANG_IMAGE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Of the lock, what is not there yet.  The last step finds all that it needs installed, or fails.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,source=requirements/lock,target=/lock \
    pip list --format=freeze | sed 's/==.*//; s/[._]/-/g' | tr '[:upper:]' '[:lower:]' > /run/there.txt && \
    awk -F '==' 'NR == FNR { there[$1]; next } /^[a-z]/ { wanted = !($1 in there) } wanted' \
        /run/there.txt /lock/engine.txt > /run/missing.txt && \
    pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: -r /run/missing.txt && \
    pip install --no-cache-dir --no-index /wheels/*.whl && \
    rm /run/there.txt /run/missing.txt
USER 10002:10002
