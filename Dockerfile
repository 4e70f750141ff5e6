# Trains in a container; on a GPU where the host has NVIDIA's container toolkit. Results go to /runs:
#   docker build -t headroom .
#   docker run --rm --init --gpus all -v "$PWD/runs:/runs" headroom --train.epochs 5
# PyTorch's own wheels bring CUDA and make an image of several GB.
FROM python:3.12-slim

# torch.compile calls a C++ compiler.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /headroom
COPY pyproject.toml constraints.txt README.md LICENSE prefect-team.yaml ./
COPY flows flows
COPY tasks tasks
# For compose.yaml: [team], which is what its servers need.
ARG EXTRA=
RUN pip install --no-cache-dir --constraint constraints.txt torch --editable ".${EXTRA}" \
    && python -m tasks.first_use

# No mlflow.yaml beside `tasks`: mlflow.db and mlartifacts then lie in the folder of the run.
WORKDIR /runs
VOLUME /runs
ENTRYPOINT ["python", "-m", "flows.train"]
