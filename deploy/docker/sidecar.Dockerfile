# The sidecar: no torch, no SGLang.  docs/deploy.md says what it installs and how much that is.
#
#   docker build -f deploy/docker/sidecar.Dockerfile -t speculation-controller:0.1.0 .
FROM python:3.11.13-slim-bookworm AS build
COPY . /source
RUN pip install --no-cache-dir --require-hashes --only-binary :all: -r /source/requirements/lock/build.txt && \
    pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels /source

FROM python:3.11.13-slim-bookworm
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,source=requirements/lock,target=/lock \
    pip install --no-cache-dir --no-compile --require-hashes --only-binary :all: -r /lock/sidecar.txt && \
    pip install --no-cache-dir --no-compile --no-index /wheels/*.whl
ENV PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
ENTRYPOINT ["controller"]
CMD ["serve"]
