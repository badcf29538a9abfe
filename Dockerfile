# One image for all four roles and the OpenAI gateway; compose.yaml says which one a container runs.
#
#   docker build -t outrider .
#   docker build -t outrider:cuda --build-arg TORCH_BUILD=cuda .
#   docker build --secret id=pip_conf,src=$HOME/.config/pip/pip.conf …     # another package index, with its password
#
# Build arguments stay in the image's history: none of them takes an address, which could hold a password.
# Layers that change rarely come first: a change of Outrider's code rebuilds only the wheel and one small layer.

# For a reproducible build, name the digest too: python:3.11-slim-bookworm@sha256:…
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS python
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# ---------------------------------------------------------------- the requirements, as text
# pyproject.toml changes more often than the requirements in it, so the next stage copies only the requirements.
FROM python AS requirements
COPY pyproject.toml constraints.txt /
RUN python - <<'PYTHON'
import pathlib
import tomllib

project = tomllib.loads(pathlib.Path("/pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
names = ("router", "node", "torch", "store", "openai", "otel")
wanted = [*project["dependencies"], *(requirement for name in names for requirement in extras[name])]
wanted.remove("outrider[router]")
pins = pathlib.Path("/constraints.txt").read_text().splitlines()
torch = [line for line in pins if line.startswith("torch==")]
pathlib.Path("/torch.txt").write_text("\n".join(torch) + "\n")
pathlib.Path("/requirements.txt").write_text("\n".join(sorted(wanted)) + "\n")
PYTHON

# ---------------------------------------------------------------- everything except Outrider
FROM python AS dependencies
# cpu: torch without CUDA, from PyTorch's index or pip's own; cuda: as the package index has it.
ARG TORCH_BUILD=cpu
COPY --from=requirements /torch.txt /usr/local/share/outrider/
# torch is installed alone and without its requirements, so that nothing else can come from that index. Headers,
# tests and build tools are removed in the same layer; torch looks for torch_shm_manager at import.
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip_conf \
    case "$TORCH_BUILD" in cpu) index=https://download.pytorch.org/whl/cpu;; cuda) index=;; \
        *) echo "TORCH_BUILD is cpu or cuda, not $TORCH_BUILD"; exit 1;; esac \
    && PIP_CONFIG_FILE=/run/secrets/pip_conf \
        python -m pip install --no-compile --no-deps ${index:+--extra-index-url "$index"} \
        -r /usr/local/share/outrider/torch.txt \
    && torch="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch" \
    && rm -rf "$torch/include" "$torch/test" "$torch/share" \
    && find "$torch/bin" -type f ! -name torch_shm_manager -delete
# Bytecode is compiled on all cores, which pip does not do. The files never change, so Python never checks their times.
COPY --from=requirements /requirements.txt /constraints.txt /usr/local/share/outrider/
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip_conf \
    PIP_CONFIG_FILE=/run/secrets/pip_conf python -m pip install --no-compile \
        -c /usr/local/share/outrider/constraints.txt -r /usr/local/share/outrider/requirements.txt \
    && python -m compileall -q -j 0 -x '/tests/|/torch/testing/_internal/' --invalidation-mode unchecked-hash \
        "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# ---------------------------------------------------------------- Outrider's wheel, and the native kernels
FROM python AS wheel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip_conf \
    PIP_CONFIG_FILE=/run/secrets/pip_conf python -m pip install 'setuptools>=77'
WORKDIR /source
# The kernels come first: they take the longest to compile, and their layer is reused until their sources change.
COPY outrider/__init__.py outrider/cache_directory.py outrider/progress.py outrider/
COPY outrider/engine/__init__.py outrider/engine/
COPY outrider/engine/cpu_kernels outrider/engine/cpu_kernels
RUN OUTRIDER_KERNEL_LIBRARIES=/kernels python -P -m outrider.engine.cpu_kernels.build --all
COPY . .
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

# ---------------------------------------------------------------- the final image
FROM dependencies AS runtime
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
# The commit that was built: --build-arg REVISION="$(git rev-parse HEAD)"
ARG REVISION=unknown
# Triton compiles its driver and the launchers of kernels when they are first used; kernels need no compiler.
ARG TORCH_BUILD=cpu
# hadolint ignore=DL3008
RUN if [ "$TORCH_BUILD" = cuda ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi
LABEL org.opencontainers.image.title="Outrider" \
    org.opencontainers.image.description="A language-model server in four gRPC services" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.base.name="docker.io/library/${PYTHON_IMAGE}"
RUN groupadd --gid 10001 outrider \
    && useradd --uid 10001 --gid outrider --no-create-home --home-dir /var/lib/outrider \
        --shell /usr/sbin/nologin outrider \
    && install --directory --owner=outrider --group=outrider /var/lib/outrider
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir --no-deps --no-index /wheels/outrider-*.whl
# Kernels of every instruction path, because the image may run on other processors than it was built on.
COPY --from=wheel /kernels /usr/local/share/outrider/kernels
ENV PYTHONUNBUFFERED=1 \
    OUTRIDER_KERNEL_LIBRARIES=/usr/local/share/outrider/kernels \
    OUTRIDER_CACHE_DIR=/var/lib/outrider/models \
    TRITON_CACHE_DIR=/var/lib/outrider/triton \
    HF_HOME=/var/lib/outrider/huggingface
USER 10001:10001
WORKDIR /var/lib/outrider
EXPOSE 50051
CMD ["outrider", "--help"]
