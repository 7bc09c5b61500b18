"""How often each layer of a model is held, kept up to date account by account."""

from __future__ import annotations

from collections.abc import Iterator

from meshnet.model import LayerRange
from services.tracker.placement.accounts import Account
from services.tracker.placement.costs import Costs


class Tally:
    """One model, among the real nodes or among the stub nodes.

    `num_sources` counts the nodes that have the model's files, `num_members` those that hold layers of it or could:
    they have the files, or fetch weights while there is a real source.

    By layer: `held` counts all holders; `staying` those that are not drained; `ready` those that serve it now, that no
    open directive drops it from, and that are neither suspect nor drained; `holders` names these last ones. `rate` sums
    what the holders get through, in thousandths of a step a second through all that each of them holds. `at_site`
    counts the staying holders by site, and `num_sites` these sites.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.num_sources = 0
        # Without the files: those that hold layers all the same, and those that fetch weights and hold none.
        self._num_holding = 0
        self._num_fetching = 0
        self.held = [0] * costs.num_layers
        self.staying = [0] * costs.num_layers
        self.ready = [0] * costs.num_layers
        self.rate = [0] * costs.num_layers
        self.holders: list[set[str]] = [set() for _ in range(costs.num_layers)]
        self.at_site: dict[str, list[int]] = {}
        self.num_sites = [0] * costs.num_layers

    @property
    def num_members(self) -> int:
        return self.num_sources + self._num_holding + (self._num_fetching if self.num_sources else 0)

    def count(self, account: Account, sign: int, rate: int) -> None:
        """Adds the account (`sign` 1) or takes it away again (-1), before it changes. `rate` is the node's."""
        model_id = self.costs.model_id
        layers = account.layers(model_id)
        if account.has_files(model_id):
            self.num_sources += sign
        elif layers:
            self._num_holding += sign
        elif account.fetches:
            self._num_fetching += sign
        if not layers:
            return
        rate *= sign
        staying = 0 if account.node.draining else sign
        at_site = self.at_site.setdefault(account.node.site, [0] * self.costs.num_layers)
        for layer in layers:
            self.held[layer] += sign
            self.staying[layer] += staying
            self.rate[layer] += rate
            before = at_site[layer]
            at_site[layer] = before + staying
            self.num_sites[layer] += (before + staying > 0) - (before > 0)
        if account.closed:
            return
        for layer in account.ready.get(model_id, ()):
            self.ready[layer] += sign
            if sign > 0:
                self.holders[layer].add(account.node_id)
            else:
                self.holders[layer].discard(account.node_id)

    def gaps(self) -> Iterator[LayerRange]:
        """Runs of layers that nobody holds."""
        return _runs(self.held) if 0 in self.held else iter(())

    def leaving(self) -> Iterator[LayerRange]:
        """Runs of layers that only draining nodes hold."""
        return _runs([staying or not held for held, staying in zip(self.held, self.staying, strict=True)])


def _runs(counts: list[int] | list[bool | int]) -> Iterator[LayerRange]:
    """Runs of layers whose count is 0."""
    start: int | None = None
    for layer, count in enumerate(counts):
        if not count and start is None:
            start = layer
        elif count and start is not None:
            yield LayerRange(start, layer)
            start = None
    if start is not None:
        yield LayerRange(start, len(counts))
