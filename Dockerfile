# retrofox for NVIDIA GPUs, with the torch whose Triton the Hopper kernels were run with:
#   docker build -t retrofox .
#   docker run --gpus all --ipc=host -v $PWD:/work -v ~/.cache/huggingface:/root/.cache/huggingface retrofox train my.yaml
# --ipc=host: several GPUs exchange data through shared memory, of which a container has 64 MB.
FROM python:3.12-slim
# Triton compiles its launchers with a C compiler
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev git && rm -rf /var/lib/apt/lists/*
COPY . /opt/retrofox
RUN pip install --no-cache-dir "torch==2.11.*" "/opt/retrofox[data,eval,track]"
WORKDIR /work
ENTRYPOINT ["retrofox"]
CMD ["--help"]
