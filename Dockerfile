# The operator's image; the engine's is worker_image/Dockerfile. Both are built from the repository's root:
#   docker build -t tpinference-operator .
ARG BASE=docker.io/library/debian:bookworm-slim

FROM ${BASE} AS python
# A base that has these already needs no package mirror.
RUN dpkg -s python3-venv ca-certificates >/dev/null 2>&1 \
 || (apt-get update \
  && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
  && rm -rf /var/lib/apt/lists/*)
ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

# Apart, so that only a change of the dependencies, not any change of pyproject.toml, installs them anew.
FROM python AS requirements
COPY pyproject.toml /
RUN python3 -c 'import tomllib; \
p = tomllib.load(open("/pyproject.toml", "rb"))["project"]; \
print(*p["dependencies"], *p["optional-dependencies"]["operator"], sep="\n")' >/requirements.txt

FROM python AS wheel
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT PIP_DEFAULT_TIMEOUT
RUN python3 -m venv /build && /build/bin/pip install hatchling
COPY . /source
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist /source

FROM python
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT PIP_DEFAULT_TIMEOUT
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY --from=requirements /requirements.txt /opt/venv/
RUN pip install -r /opt/venv/requirements.txt
COPY --from=wheel /dist /dist
RUN pip install --no-deps /dist/*.whl

# By number: a pod that must not run as root can only check numbers. USER names it for getpass, which
# kopf asks and which knows no other number that a cluster may choose either.
ENV USER=operator HOME=/tmp
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "tpinference_operator"]
