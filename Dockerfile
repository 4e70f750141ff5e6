# Trains in a container, on a GPU where the host has NVIDIA's container toolkit; results go to `runs`:
#   docker build --tag headroom .
#   mkdir -p runs
#   docker run --rm --init --gpus all --shm-size 8g --user "$(id -u):$(id -g)" \
#     --volume "$PWD/runs:/runs" headroom --train.epochs 5
# More, as why these words: docs/team.md#in-containers. PyTorch's own wheels bring CUDA and make an
# image of several GB.
FROM python:3.12-slim

# torch.compile calls a C++ compiler; `train-team` of prefect-team.yaml clones with git.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

# Not root, and whoever `--user` names may write there too. A new volume gets a folder's owner and
# mode, so those that compose.yaml mounts one at are here.
RUN useradd --uid 1000 --home-dir /home/headroom headroom \
    && install --directory --owner headroom --mode 1777 \
        /home/headroom /headroom/.headroom /runs /s3 /leases
# For a user whom no list of users knows: where its home is, and its name.
ENV HOME=/home/headroom USER=headroom

# What it needs before what changes: new sources bring no gigabytes anew. Empty packages stand for
# the sources, which --editable reads where they are once they are here.
WORKDIR /headroom
COPY pyproject.toml ./
COPY pins pins
# For compose.yaml: run team, which is what its servers need.
ARG PINS=run
RUN mkdir headroom flows tasks \
    && touch headroom/__init__.py README.md LICENSE \
    && PIP_NO_CACHE_DIR=1 python pins/install.py ${PINS}
# What the image is made of, of Python and of Debian: CycloneDX.
RUN python -m venv /tmp/supply \
    && PIP_NO_CACHE_DIR=1 /tmp/supply/bin/python pins/install.py supply \
    && /tmp/supply/bin/python pins/sbom.py image "$(which python)" /usr/share/headroom.cdx.json \
    && rm -r /tmp/supply

COPY README.md LICENSE prefect-team.yaml ./
COPY headroom headroom
COPY flows flows
COPY tasks tasks
RUN python -m compileall -q headroom flows tasks \
    && python -m headroom.services.first_use \
    && chmod -R a+rwX /home/headroom

# No mlflow.yaml beside `headroom`: mlflow.db and mlartifacts then lie in the folder of the run.
WORKDIR /runs
VOLUME /runs
# A number, by which Kubernetes sees that it is not root's.
USER 1000
ENTRYPOINT ["python", "-m", "flows.train"]
