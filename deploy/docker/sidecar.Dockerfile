# The sidecar: no torch, no SGLang.  docs/deploy.md says what it installs and how much that is.
#
#   docker build -f deploy/docker/sidecar.Dockerfile -t speculation-controller:0.1.0 .
FROM python:3.11.13-slim-bookworm AS build
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.11.13-slim-bookworm
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,source=requirements,target=/requirements \
    pip install --no-cache-dir --no-compile -c /requirements/constraints.txt /wheels/*.whl
ENV PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
ENTRYPOINT ["controller"]
CMD ["serve"]
