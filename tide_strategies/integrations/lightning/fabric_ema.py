"""``TideFabricEMA``: an exponential moving average of a sharded model in a training loop of one's own with Fabric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.lightning.average import MovingAverage


class TideFabricEMA(MovingAverage):
    """Averages the trainable parameters of a model that ``fabric.setup`` has sharded.

    Call :meth:`update` after each optimizer step, and evaluate inside ``with ema.averaged():``. Among the ``callbacks``
    of Fabric, ``fabric.call("update", model)`` does the first. ``fabric.save`` and ``fabric.load`` take it in their
    ``state``, beside the model.

    Options: :class:`MovingAverage`.

    Raises:
        TideConfigError: for a value that is not allowed.
    """

    _steps = 0

    def update(self, model: nn.Module) -> None:
        """Count an optimizer step and, if it is time to, take the parameters as they are now; no communication.

        Args:
            model: what ``fabric.setup`` or ``fabric.setup_module`` has returned; always the same.

        Raises:
            TideConfigError: if the model is not sharded, or not the one of the calls before.
        """
        module = _inner(model)
        if not isinstance(module, FSDPModule):
            raise TideConfigError(
                f"TideFabricEMA averages a model that fabric.setup() has sharded with strategy='tide_fsdp'; got "
                f"{type(module).__name__}. For other models use torch.optim.swa_utils.AveragedModel."
            )
        assert isinstance(module, nn.Module)
        if self._average is not None and self._average.module is not module:
            raise TideConfigError("this TideFabricEMA averages another model: make one for each model")
        self._steps += 1
        self._stepped(module, self._steps)

    def to_save(self, portable: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> dict[str, Any]:
        """What a checkpoint holds of it; ``portable`` turns the averages of the shards into what is written.

        Raises:
            TideConfigError: inside of :meth:`averaged`, when the model's part would hold the averages too.
        """
        if self._average is not None and self._average.applied:
            raise TideConfigError(
                "fabric.save() inside of averaged() would write the averages as the model's parameters and lose those. "
                "Save outside of it; or leave the TideFabricEMA out of the state, to write a model of averages."
            )
        averages = {} if self._average is None else self._average.state()
        return {"steps": self._steps, "last_update": self._last_update, "average": portable(averages)}

    def load(self, module: nn.Module, saved: Mapping[str, Any]) -> None:
        """Go on from what :meth:`to_save` gave, with the averages whole or sharded like the module.

        Raises:
            TideConfigError: if the averages are those of another model.
        """
        self._average = None
        self._steps, self._last_update = saved["steps"], saved["last_update"]
        if self._last_update is not None:
            self._average = self._new(module)
            self._average.load(saved["average"])


def _inner(model: Any) -> Any:
    """The model inside of Fabric's and torch.compile's wrappers, in whichever order they are."""
    while not isinstance(model, FSDPModule):
        wrapped = vars(model).get("_modules", {}) if isinstance(model, nn.Module) else {}
        inner = wrapped.get("_forward_module", wrapped.get("_orig_mod"))
        if inner is None:
            break
        model = inner
    return model
