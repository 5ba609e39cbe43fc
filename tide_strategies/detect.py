"""Verdicts: whether a parameter group can use TIDE, why not, and what to do about it.

Codes are stable: they appear in reports, logs and the documentation (``docs/fallbacks.md``). ``TIDE-OK`` accelerates;
any other keeps stock collectives for the group, which changes nothing but speed.
"""

from __future__ import annotations

from dataclasses import dataclass

OK = "TIDE-OK"

#: code -> (reason, remedy). ``{}`` takes the detail of the case.
FALLBACKS: dict[str, tuple[str, str]] = {
    "TIDE-F001": (
        "the group is replicated, not sharded",
        "use fully_shard, which has an all-gather and a reduce-scatter to accelerate",
    ),
    "TIDE-F002": (
        "the group has custom collectives of its own ({})",
        "remove set_custom_all_gather, set_custom_reduce_scatter, set_symm_mem_for_comm or "
        "set_allocate_memory_from_process_group_for_comm for this module",
    ),
    "TIDE-F003": ("{} is sharded on dimension {}", "shard on dimension 0 to accelerate this group"),
    "TIDE-F004": (
        "{} has an all-gather extension (fsdp_pre_all_gather)",
        "none: the extension decides what is gathered",
    ),
    "TIDE-F005": ("the group is offloaded to the CPU", "do without CPUOffloadPolicy to accelerate this group"),
    "TIDE-F006": ("{} has dtype {}, which TIDE does not reduce", "use bfloat16 or float32 parameters"),
    "TIDE-F007": (
        "reshard_after_forward is a number, so the group reshards to a smaller mesh",
        "use reshard_after_forward=True or False",
    ),
    "TIDE-F008": (
        "the module has several parameter groups (a mesh per parameter)",
        "none yet: groups that share a module keep stock collectives",
    ),
    "TIDE-F009": ("device type {} has no transport", "use CPU or NVIDIA GPU ranks"),
    "TIDE-F010": ("the group has one rank: there is nothing to communicate", "none needed"),
    "TIDE-F011": ("the group has no parameters", "none needed"),
    "TIDE-F012": ("{} is a DTensor before sharding (tensor or expert parallel)", "none yet: use it without TIDE"),
    "TIDE-F013": ("{} casts from {} to {}", "use a MixedPrecisionPolicy between float32 and bfloat16"),
    "TIDE-F014": ("the reduction dtype is {}", "use reduce_dtype=torch.float32 or torch.bfloat16"),
    "TIDE-F015": ("the group's class is {}, not FSDP2's own", "do without the library that replaces it"),
    "TIDE-F016": (
        "the GPU transport is not available: {}",
        "use an NVIDIA GPU and driver with CUDA 12 or newer, install triton, and set CUDA_DEVICE_MAX_CONNECTIONS=32 "
        "in the environment of the job",
    ),
    "TIDE-F017": (
        "the group has {} parameters with gradients, and the GPU's summing kernel takes {} at most",
        "wrap smaller modules",
    ),
    "TIDE-F018": (
        "a CUDA graph is being captured",
        "capture what lies between FSDP2's collectives, or set plan: stock",
    ),
    "TIDE-F020": (
        "the ranks cannot share memory: {}",
        "run the ranks of a node on one host and on GPUs that reach each other, or leave topology and rail on auto",
    ),
    "TIDE-F021": (
        "there is no room for the shared arena: {}",
        "free memory, raise the container's limit, use more ranks, or wrap smaller blocks",
    ),
    "TIDE-F022": ("the configuration keeps stock collectives (plan: stock)", "set plan: auto"),
    "TIDE-F023": (
        "the rail that is asked for does not reach GPUs of other hosts: {}",
        "set rail: auto, shard within a host (HSDP replicates across hosts), or run all ranks on one host",
    ),
    "TIDE-F024": (
        "the configured topology {} does not fit the group: {}",
        "set topology: auto, or state the nodes and ranks that the job has",
    ),
    "TIDE-F025": ("another rank cannot: {}", "see that rank's own report"),
    "TIDE-F026": (
        "stock collectives are faster for this group here: {}",
        "none needed; plan: tide uses TIDE all the same",
    ),
    "TIDE-F027": ("the ranks' hosts do not form a topology: {}", "start the same number of ranks on every host"),
    "TIDE-F028": (
        "the nodes cannot be connected: {}",
        "see that gloo finds the network between the hosts (GLOO_SOCKET_IFNAME), or shard within a host",
    ),
    "TIDE-F029": (
        "the GPUs of different nodes cannot be connected through NCCL: {}",
        "use the NCCL that tide doctor asks for and RDMA network cards between hosts, or shard within a host",
    ),
    "TIDE-F030": ("gradients of different dtypes arrived in one call", "none needed: such calls run as stock"),
    "TIDE-F031": ("gradients of dtype {} arrived", "use bfloat16 or float32 gradients"),
    "TIDE-F032": (
        "messages through the host connect the GPUs of different nodes, since NCCL does not: {}",
        "use the NCCL that tide doctor asks for and RDMA network cards, or set rail: p2p to be content with it",
    ),
    "TIDE-F101": ("torch {} is not a version that TIDE knows", "use a supported torch (docs/supported_torch.md)"),
    "TIDE-F102": ("torch's own source differs from the release: {}", "use an unmodified torch release"),
    "TIDE-F103": ("torch's private interface differs: {}", "use a supported torch (docs/supported_torch.md)"),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One group's verdict: a stable code, the reason in words, and the remedy."""

    code: str = OK
    reason: str = "eligible"
    remedy: str = ""

    @property
    def ok(self) -> bool:
        """Whether the group uses TIDE."""
        return self.code == OK

    def __str__(self) -> str:
        return f"{self.code} {self.reason}: stock collectives are used; {self.remedy}" if not self.ok else self.code


def fallback(code: str, *detail: object) -> Verdict:
    """The verdict with this code; ``detail`` fills in its reason."""
    reason, remedy = FALLBACKS[code]
    return Verdict(code, reason.format(*detail), remedy)
