"""The next backward all-gather, issued ahead of a reduction's network phase (paper, sections 5.1 and 5.3, figure 7).

FSDP2 gives out the reduction of group l in its ``post_backward``, and the all-gather of group l - 2 only after that,
in the ``pre_backward`` of group l - 1. Across nodes that all-gather, for which the backward of l - 2 waits, would be
behind a whole network phase, for which nothing waits before the optimizer. So it is issued here, when group l has given
up its slot and before its reduction is given out; the ``pre_backward`` of l - 1 finds it under way and does nothing.

Group l - 2 is two back in the order of forward invocations. Torch notes this order (``post_forward_order``, an entry
for each invocation), and for each group those of its invocations whose backward is still to come
(``_post_forward_indices``). So two invocations of one module stay two, in one forward or over several micro-batches,
and the second forward of a checkpoint, which torch does not note, is none.

It is torch's own prefetch, made earlier, and only if torch would make it. Where not all modules are used in a backward
it may be wrong, as torch's may: then it is given back at the end of the backward, or sooner when another group needs
the slot. All ranks do alike, as all of this follows from the order in which modules run.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup, TrainingState

from tide_strategies.fsdp2.access import prefetches_by_hand


class GatherAhead:
    """Of the groups of one engine whose nodes are several and whose gradients rest in place."""

    def __init__(self) -> None:
        #: Groups that were gathered ahead and have not been used since.
        self._early: list[Any] = []

    def before_reduction(self, group: Any) -> None:
        """Issue the all-gather that the next group's ``pre_backward`` would, if that is known and a slot is free."""
        target = self._target(group, group._tide.invocation)
        if target is None:
            return
        FSDPParamGroup._prefetch_unshard(target, "backward")
        if target._all_gather_result is None:  # set_unshard_in_backward(False)
            return
        self._early.append(target)
        target._tide.all_gathers.ahead += 1
        group._tide.path.network_after_rail()

    def make_room(self, group: Any) -> None:
        """Give back what was gathered ahead, the latest first, until a slot is free for ``group``."""
        while self._early and not group._tide.path.collectives.has_room:
            self._early.pop()._drop_pending()

    def settled(self, group: Any) -> None:
        """The group's all-gather, ahead or not, has been waited for."""
        if group in self._early:
            self._early.remove(group)

    def _target(self, group: Any, invocation: int | None) -> Any:
        """The group to gather when ``group``, whose backward was of this invocation, is to be reduced; None: none."""
        order = group.comm_ctx.post_forward_order
        if invocation is None or not 2 <= invocation < len(order) or order[invocation] is not group:
            return None
        following, target = order[invocation - 1], order[invocation - 2]
        if not _will_prefetch(following, invocation - 1) or not self._may_gather(target, group, invocation - 2):
            return None
        return target

    def _may_gather(self, target: Any, group: Any, invocation: int) -> bool:
        binding = getattr(target, "_tide", None)
        # Not the group's own: hooks of this very reduction may change its shards.
        if target is group or binding is None or binding.ahead is not self:
            return False
        gathered = target.is_unsharded or target._all_gather_result is not None
        return not gathered and _awaits(target, invocation) and binding.path.collectives.has_room


def _will_prefetch(group: Any, invocation: int) -> bool:
    """Whether the group is gathered, and its ``pre_backward`` will come and prefetch the invocation before this one."""
    if group._training_state == TrainingState.PRE_BACKWARD or not _awaits(group, invocation):
        return False
    if getattr(group, "_num_param_groups", 1) > 1 or prefetches_by_hand(group):  # torch 2.11: never several
        return False
    return group.is_unsharded or group._all_gather_result is not None


def _awaits(group: Any, invocation: int) -> bool:
    """Whether this is the group's latest invocation whose backward has not begun."""
    return bool(group._post_forward_indices) and group._post_forward_indices[-1] == invocation
