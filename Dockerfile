# One image for every part of a mesh: `meshnet tracker-node`, `meshnet node`, `meshnet status`.
#
#   docker build -t meshnet .
#
# For machines without a GPU, --build-arg PIP_EXTRA_INDEX_URL=URL of an index with CPU builds of torch keeps CUDA out.

ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
# Without a default it is not set at all, and pip's own configuration holds.
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml constraints.txt ./
# The dependencies of an empty package: this layer stays when only the code changes.
RUN python3 -m venv /opt/meshnet \
    && mkdir meshnet && echo '__version__ = "0"' > meshnet/__init__.py && touch README.md \
    && /opt/meshnet/bin/pip install -c constraints.txt setuptools \
    && /opt/meshnet/bin/pip install -c constraints.txt --no-build-isolation ".[demo]" \
    && /opt/meshnet/bin/pip uninstall -y meshnet && rm -rf meshnet build ./*.egg-info

FROM build AS code
COPY README.md ./
COPY meshnet ./meshnet
COPY services ./services
RUN /opt/meshnet/bin/pip install --no-deps --no-index --no-build-isolation --root /code .

FROM ${BASE}
# A new volume in the place of the second folder belongs to whom the folder does.
RUN useradd --uid 10001 --create-home meshnet \
    && install --directory --owner meshnet --mode 0700 /var/lib/meshnet
COPY --from=build /opt/meshnet /opt/meshnet
COPY --from=code /code /
ENV PATH=/opt/meshnet/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
USER meshnet
WORKDIR /home/meshnet
# 7700: tracker (gRPC); 7710, 7711: node (HTTP, gRPC); 8000: gateway (HTTP).
EXPOSE 7700 7710 7711 8000
ENTRYPOINT ["meshnet"]
CMD ["--help"]
