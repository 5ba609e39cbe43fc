"""A Hydra application in plain PyTorch: try options of TIDE, one training per combination.

    python examples/hydra_sweep.py tide=debug tide.timeout_s=30         # one training
    python examples/hydra_sweep.py -m tide=stock,default steps=10       # a sweep
    python examples/hydra_sweep.py device=cuda processes=8 batch=16 model.layers=12 model.width=768

Each training starts its own processes, on the CPU or a GPU each, and writes ``result.json`` into Hydra's output folder.
"""

import json
import os
import statistics
import time
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tide_strategies import apply_tide
from tide_strategies.cli.demo_model import GPT, GPTConfig, Windows, library_text
from tide_strategies.runtime.teardown import orderly_teardown


def train(rank, config, folder):
    """One process of the training; rank 0 writes the result."""
    torch.set_num_threads(1)
    cuda = config["device"] == "cuda"
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=config["processes"]
    )
    torch.manual_seed(0)
    model = GPT(GPTConfig(**config["model"])).to(config["device"])
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    handle = apply_tide(model, config["tide"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    data = Windows(library_text()[0], config["steps"] * config["batch"], seed=rank)
    seconds, losses = [], []
    for window in DataLoader(data, batch_size=config["batch"]):
        start = time.perf_counter()
        window = window.to(config["device"])
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # on a GPU, the step is done only now
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        # Later steps only: the first one sets everything up.
        median = statistics.median(seconds[len(seconds) // 4 :])
        result = {"loss": losses[-1], "seconds_per_step": median, "status": handle.report().status}
        Path(folder, "result.json").write_text(json.dumps(result, indent=2))
    handle.close()
    orderly_teardown()


@hydra.main(version_base=None, config_path=".", config_name="hydra_sweep")
def main(config):
    """Run one training; returns its time per step, for sweepers that minimise something."""
    folder = HydraConfig.get().runtime.output_dir
    Path(folder, "store").unlink(missing_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # TIDE needs it on GPUs, before CUDA starts
    mp.spawn(train, args=(OmegaConf.to_container(config, enum_to_str=True), folder), nprocs=config.processes)
    result = json.loads(Path(folder, "result.json").read_text())
    print(f"{result['seconds_per_step']:.3f} s per step, loss {result['loss']:.3f}, {result['status']}", flush=True)
    return result["seconds_per_step"]


if __name__ == "__main__":
    main()
