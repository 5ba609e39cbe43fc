"""The FSDP2 adapter: the only part that touches torch's private FSDP2 code, behind guards for each version."""

from tide_strategies.fsdp2.handle import TideHandle, apply_tide

__all__ = ["TideHandle", "apply_tide"]
