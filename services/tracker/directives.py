"""The ledger of directives: what was ordered, and how far each order has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from meshnet.directive import Directive, DirectiveState
from meshnet.errors import InvalidRequest
from services.tracker.placement import Draft

HISTORY = 1000


class Ledger:
    """Directives in the order of issue. Open ones are kept; of the finished ones only the newest `history`."""

    def __init__(self, new_id: Callable[[], str], history: int = HISTORY) -> None:
        self._new_id = new_id
        self._history = history
        self._directives: dict[str, Directive] = {}

    def issue(self, drafts: Iterable[Draft], plan_version: int) -> tuple[Directive, ...]:
        issued = tuple(
            Directive(
                directive_id=self._new_id(),
                node_id=draft.node_id,
                kind=draft.kind,
                model_id=draft.model_id,
                layers=draft.layers,
                plan_version=plan_version,
                reason=draft.reason,
                quantization=draft.quantization,
                revision=draft.revision,
                kv_tokens=draft.kv_tokens,
            )
            for draft in drafts
        )
        self._directives.update((directive.directive_id, directive) for directive in issued)
        self._forget_oldest()
        return issued

    def all(self, node_id: str | None = None) -> tuple[Directive, ...]:
        return tuple(d for d in self._directives.values() if node_id is None or d.node_id == node_id)

    def open(self, node_id: str | None = None) -> tuple[Directive, ...]:
        """Directives that are not finished, of one node or of all."""
        return tuple(directive for directive in self.all(node_id) if not directive.state.is_final)

    def report(
        self,
        node_id: str,
        directive_id: str,
        state: DirectiveState,
        *,
        bytes_done: int | None = None,
        bytes_total: int | None = None,
        failure: str = "",
    ) -> Directive:
        """The directive as it is after the node's report. A report that is sent twice changes nothing.

        Raises InvalidRequest for a directive that the node does not have, and for a step that the table forbids.
        """
        directive = self._directives.get(directive_id)
        if directive is None or directive.node_id != node_id:
            raise InvalidRequest(f"node {node_id} has no directive {directive_id!r}")
        if state is directive.state and state is not DirectiveState.LOADING:
            return directive
        directive = directive.advance(state, bytes_done=bytes_done, bytes_total=bytes_total, failure=failure)
        self._directives[directive_id] = directive
        return directive

    def fail_node(self, node_id: str, failure: str) -> tuple[Directive, ...]:
        """Ends all open directives of a node that is gone."""
        failed = tuple(d.advance(DirectiveState.FAILED, failure=failure) for d in self.open(node_id))
        self._directives.update((directive.directive_id, directive) for directive in failed)
        return failed

    def _forget_oldest(self) -> None:
        finished = [d.directive_id for d in self._directives.values() if d.state.is_final]
        for directive_id in finished[: max(0, len(self._directives) - self._history)]:
            del self._directives[directive_id]
