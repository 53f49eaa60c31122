# The unmodified SGLang on a processor, with the shim and the small models of this project.
#
#   docker build -f deploy/docker/demo.Dockerfile -t speculation-demo:0.1.0 .
FROM python:3.11.13-slim-bookworm
# An index with CPU builds of torch makes this image some gigabytes smaller.
ARG TORCH_PIP_ARGS=
COPY . /source
WORKDIR /source
# SGLang goes in without its CUDA packages, as scripts/setup.sh does it.
# hadolint ignore=SC2086
RUN pip install --no-cache-dir -c requirements/constraints.txt ${TORCH_PIP_ARGS} torch && \
    pip install --no-cache-dir -c requirements/constraints.txt --no-deps sglang && \
    pip install --no-cache-dir -c requirements/constraints.txt -r requirements/sglang-cpu.txt && \
    pip install --no-cache-dir -c requirements/constraints.txt ./engine_shim && \
    mkdir -p /opt/demo && cp -r lab /opt/demo && \
    ln -s /opt/demo/lab/cpu_engine/models /models
# The small models and the CPU engine are in no wheel; they need parts of the lab beside them.
ENV PYTHONPATH=/opt/demo
WORKDIR /
USER 10002:10002
ENTRYPOINT ["python", "-m", "lab.cpu_engine.serve"]
