"""The ledger of directives: what was ordered, and how far each order has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from meshnet.directive import Directive, DirectiveState, FailureKind
from meshnet.errors import InvalidRequest
from services.tracker.placement import Draft

HISTORY = 1000


class Ledger:
    """Directives in the order of issue. Open ones are kept; of the finished ones only the newest `history`.

    `changed`: nodes whose open directives have changed since somebody last cleared it.
    """

    def __init__(self, new_id: Callable[[], str], history: int = HISTORY) -> None:
        self._new_id = new_id
        self._history = history
        self._directives: dict[str, Directive] = {}
        self._open: dict[str, dict[str, Directive]] = {}
        self._finished: deque[str] = deque()
        self.changed: set[str] = set()

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
                kv_precision=draft.kv_precision,
            )
            for draft in drafts
        )
        for directive in issued:
            self._keep(directive)
        return issued

    def all(self, node_id: str | None = None) -> tuple[Directive, ...]:
        return tuple(d for d in self._directives.values() if node_id is None or d.node_id == node_id)

    def open(self, node_id: str) -> tuple[Directive, ...]:
        """Directives of a node that are not finished, in the order of issue."""
        return tuple(self._open.get(node_id, {}).values())

    def nodes_with_open(self) -> tuple[str, ...]:
        return tuple(self._open)

    def report(
        self,
        node_id: str,
        directive_id: str,
        state: DirectiveState,
        *,
        bytes_done: int | None = None,
        bytes_total: int | None = None,
        failure: str = "",
        failure_kind: FailureKind | None = None,
    ) -> Directive:
        """The directive as it is after the node's report. A report that is sent twice changes nothing.

        Raises InvalidRequest for a directive that the node does not have, and for a step that the table forbids.
        """
        directive = self._directives.get(directive_id)
        if directive is None or directive.node_id != node_id:
            raise InvalidRequest(f"node {node_id} has no directive {directive_id!r}")
        if state is directive.state and state is not DirectiveState.LOADING:
            return directive
        directive = directive.advance(
            state, bytes_done=bytes_done, bytes_total=bytes_total, failure=failure, failure_kind=failure_kind
        )
        self._keep(directive)
        return directive

    def fail_node(self, node_id: str, failure: str) -> tuple[Directive, ...]:
        """Ends all open directives of a node that is gone, or that does not answer."""
        failed = tuple(
            d.advance(DirectiveState.FAILED, failure=failure, failure_kind=FailureKind.NO_ANSWER)
            for d in self.open(node_id)
        )
        for directive in failed:
            self._keep(directive)
        return failed

    def _keep(self, directive: Directive) -> None:
        self._directives[directive.directive_id] = directive
        self.changed.add(directive.node_id)
        if not directive.state.is_final:
            self._open.setdefault(directive.node_id, {})[directive.directive_id] = directive
            return
        of_node = self._open.get(directive.node_id, {})
        of_node.pop(directive.directive_id, None)
        if not of_node:
            self._open.pop(directive.node_id, None)
        self._finished.append(directive.directive_id)
        while len(self._finished) > self._history:
            del self._directives[self._finished.popleft()]
