"""Lay out the samples of one session. Exporting never changes stored data.

In layouts concat, padded and tree, every sampled token that is selected for training has loss mask 1 in exactly one
sample: the first that contains it and is not left out. In layout individual, it is trained in the sample of its own
turn. Sampled tokens that no sample trains are counted by reason (`proxy.trajectory.session_samples`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from proxy.side_columns.columns import Columns
from proxy.trajectory.advantages import Comparison, Groups
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.ledger import Ledger
from proxy.trajectory.padded_sample import PaddedSample, Window, window_of
from proxy.trajectory.path_sample import PathSample
from proxy.trajectory.paths import Path, leaves, path_nodes, path_to
from proxy.trajectory.routes import by_route
from proxy.trajectory.sample_maker import Decode, SampleMaker
from proxy.trajectory.sample_row import MadeRows, PositionsOf
from proxy.trajectory.scored_session import ScoredSession, scored_session
from proxy.trajectory.selection import not_trained
from proxy.trajectory.session_samples import SessionSamples, joined_routes, logprob_warnings
from proxy.trajectory.side_source import SideSource, replay_warnings
from proxy.trajectory.token_arrays import BoolArray, IntArray, Placement
from proxy.trajectory.tree import Branch
from proxy.trajectory.tree_sample import TreeSample
from proxy.types import Interaction, SessionRecord
from tokengrove.options.export import Drift, Images, Layout, Stale
from tokengrove.reasons import Unrecomputable, Untrained

NO_SIDE: Mapping[str, Columns] = MappingProxyType({})


def lay_out(
    record: SessionRecord,
    interactions: Sequence[Interaction],
    options: LayoutOptions,
    groups: Groups | None = None,
    decoder: Callable[[str], Decode | None] = lambda _: None,
    positions: PositionsOf | None = None,
    columns: Mapping[str, Columns] = NO_SIDE,
) -> SessionSamples:
    """Lay out one session, each of its routes by itself. `interactions`: all of the session's, in order of `seq`.

    `groups`: the statistics that advantages are computed from. `decoder`: returns what decodes the tokens of a route,
    which text requires. `positions`: if given, samples have the positions of a vision model. `columns`: the side
    columns of its turns, by interaction id.
    """
    lay = partial(_lay_out_route, record, options=options, groups=groups, positions=positions, columns=columns)
    routes = by_route(interactions)
    if all(route == "" for route in routes):
        return lay(interactions, decode=decoder(""))
    taken = [name for name, turns in routes.items() if any(map(options.takes, turns))]
    laid = {name: lay(turns, decode=decoder(name)) for name, turns in routes.items()}
    return joined_routes(laid, taken, lay([], decode=None))


def _lay_out_route(
    record: SessionRecord,
    interactions: Sequence[Interaction],
    options: LayoutOptions,
    groups: Groups | None,
    decode: Decode | None,
    positions: PositionsOf | None,
    columns: Mapping[str, Columns],
) -> SessionSamples:
    scored = scored_session(record, interactions, options)
    comparison = Comparison(scored, groups or Groups(), options)
    shows = options.images is not Images.NONE or options.forest is not None
    side = SideSource(options.columns, columns)
    maker = SampleMaker(scored, comparison, options.include, decode, shows_images=shows, positions=positions, side=side)
    session_samples = _SessionLayout(scored, options, _ledger(scored, options), maker).laid()
    warnings = (
        *logprob_warnings((node.interaction for node in scored.nodes.values()), session_samples.ledger),
        *replay_warnings(options, scored.nodes.values(), columns),
        *comparison.warnings(),
    )
    return replace(session_samples, entry=comparison.entry(), warnings=warnings)


def export_session(
    record: SessionRecord, interactions: Sequence[Interaction], options: LayoutOptions
) -> list[PathSample]:
    """The samples of one session in layout individual or concat, in order of their last interaction in each route."""
    return [row for row in lay_out(record, interactions, options).rows if isinstance(row, PathSample)]


def _ledger(scored: ScoredSession, options: LayoutOptions) -> Ledger:
    complete = [node.interaction for node in scored.nodes.values()]
    unfinished = options.mask_unfinished and scored.record.finished is False
    excluded = not_trained(
        complete, scored.selected, scored.chosen, unfinished=unfinished, train=options.train, routes=options.routes
    )
    ledger = Ledger.of(complete, excluded, options.placeholders)
    if options.stale is Stale.MASK:
        for interaction in complete:
            if ledger.open(interaction.id).any():
                ledger.mask(interaction.id, options.freshness.older(interaction))
    return ledger


@dataclass(frozen=True, slots=True)
class _SessionLayout:
    """Assigns the tokens of a session to samples, and records the assignment in the `ledger`."""

    scored: ScoredSession
    options: LayoutOptions
    ledger: Ledger
    maker: SampleMaker

    def laid(self) -> SessionSamples:
        if self.scored.left_out is not None:
            self._leave_out(self.scored.nodes.values(), Untrained.UNREWARDED)
            return SessionSamples([], self.ledger)
        match self.options.layout:
            case Layout.INDIVIDUAL:
                return self._individual()
            case Layout.TREE:
                return self._tree()
            case Layout.CONCAT | Layout.PADDED | Layout.FOREST:
                return self._concat()

    def _individual(self) -> SessionSamples:
        """One sample per selected interaction: its whole prompt and its output. Samples are made when they are read."""
        fresh: list[tuple[Branch, BoolArray]] = []
        refused: Counter[Untrained] = Counter()
        for name in self._in_order(self.scored.selected):
            tokens = self.ledger.open(name)
            reason = self._why_not(name, tokens)
            if reason is None:
                self.ledger.train(name, tokens)
                fresh.append((self.scored.nodes[name], tokens))
            else:
                self.ledger.leave_out(name, reason)
                refused[reason] += 1
        share = 1.0 / max(sum(bool(tokens.any()) for _, tokens in fresh), 1)
        rows = MadeRows([partial(self.maker.of_turn, node, tokens, share) for node, tokens in fresh])
        return SessionSamples(
            rows, self.ledger, stale=refused[Untrained.STALE], unrewarded=refused[Untrained.UNREWARDED]
        )

    def _why_not(self, name: str, tokens: BoolArray) -> Untrained | None:
        """Why the sample of a turn that would train these tokens is left out; None if it is not left out."""
        if self.scored.scores.is_left_out(self.scored.ends_through([name])):
            return Untrained.UNREWARDED
        return None if self.options.freshness.admits(self._versions({name: tokens})) else Untrained.STALE

    def _concat(self) -> SessionSamples:
        """One sample per leaf, in order of `seq`. A token is trained in the first sample that has it.

        Samples that are stale, unrewarded or longer than the padded lengths (or a sequence) are left out and counted; a
        later sample may train their tokens. Truncation comes first.
        """
        samples: list[PathSample | PaddedSample] = []
        refused: Counter[Untrained] = Counter()
        for leaf in leaves(list(self.scored.nodes.values()), self.scored.selected, self.options.drift):
            sample = self._path_sample(leaf)
            if isinstance(sample, Untrained):
                refused[sample] += 1
            else:
                samples.append(sample)
        return SessionSamples(
            rows=_weighted(samples),
            ledger=self.ledger,
            masked_tokens=_masked_tokens(samples),
            dropped=refused[Untrained.TOO_LONG],
            stale=refused[Untrained.STALE],
            unrewarded=refused[Untrained.UNREWARDED],
        )

    def _path_sample(self, leaf: Branch) -> PathSample | PaddedSample | Untrained:
        """The sample that ends with a leaf, or why it is left out. Either is recorded in the ledger."""
        drift, padding = self.options.drift, self.options.padding
        if self.scored.scores.is_left_out([leaf.interaction.id]):
            self._leave_out(path_nodes(leaf, drift), Untrained.UNREWARDED)
            return Untrained.UNREWARDED
        path = path_to(leaf, drift)
        most = None if self.options.forest is None else self.options.forest.max_tokens
        if most is not None and len(path.ids) > most:
            self._leave_out(path.nodes, Untrained.TOO_LONG)
            return Untrained.TOO_LONG
        window = None if padding is None else window_of(path, padding)
        if padding is not None and window is None:
            self._leave_out(path.nodes, Untrained.TOO_LONG)
            return Untrained.TOO_LONG
        places = self._places(path, window)
        tokens = {place.interaction.id: place.trained for place in places if place.trained is not None}
        if not self.options.freshness.admits(self._versions(tokens)):
            self._note(places, Untrained.STALE)
            return Untrained.STALE
        self._note(places, None)
        sample = self.maker.of_path(path, places)
        return sample if padding is None or window is None else PaddedSample(sample, padding, window)

    def _places(self, path: Path, window: Window | None) -> tuple[Placement, ...]:
        """The placements of a path's nodes. They train the kept tokens that are still open in the ledger."""
        places = []
        for turn, (node, start, drifted) in enumerate(zip(path.nodes, path.starts, path.drifted, strict=True)):
            interaction, kept, trained = node.interaction, None, None
            if start is not None:
                length = len(interaction.output_ids)
                kept = (0, length) if window is None else window.kept(start, length)
            if kept is not None and interaction.id in self.scored.selected:
                trained = self.ledger.open(interaction.id)
                trained[: kept[0]] = trained[kept[1] :] = False
            cut = window is not None and (window.cuts_context or kept is None)
            context = Unrecomputable.DRIFT if drifted else Unrecomputable.CUT if cut else None
            masks = self.maker.side.masks(interaction)
            places.append(Placement(interaction, turn, start, kept, trained, context, masks))
        return tuple(places)

    def _note(self, places: Sequence[Placement], refused: Untrained | None) -> None:
        """Record in the ledger the tokens that a sample trains, or why it is `refused`, and the tokens it lacks."""
        for place in places:
            name = place.interaction.id
            self.ledger.leave_out(name, Untrained.DRIFT if place.start is None else Untrained.CUT, ~place.in_sample)
            if place.trained is not None and refused is None:
                self.ledger.train(name, place.trained)
            elif place.trained is not None and refused is not None:
                self.ledger.leave_out(name, refused, place.trained)

    def _leave_out(self, nodes: Iterable[Branch], reason: Untrained) -> None:
        for node in nodes:
            self.ledger.leave_out(node.interaction.id, reason)

    def _tree(self) -> SessionSamples:
        """One sample of the selected nodes and their aligned ancestors; no sample if nothing is selected.

        Turns older than `min_version` are left out first, unless their old tokens are masked, then paths that span more
        than `max_version_span`, in order of their leaves. The version of a token counts on the path that first trains
        it. A turn that is left out stays as context if a turn below it is kept.
        """
        recent, trained = self._recent_turns(), dict[str, BoolArray]()
        wanted: set[str] = set()
        for leaf in leaves(list(self.scored.nodes.values()), recent, Drift.FORK):
            path = list(_up_to(leaf, wanted))
            tokens = {name: self.ledger.open(name) for name in path if name in recent}
            if self.options.freshness.is_narrow(self._versions(tokens)):
                wanted.update(path)
                trained |= tokens
                for name, each in tokens.items():
                    self.ledger.train(name, each)
            else:
                for name in tokens:
                    self.ledger.leave_out(name, Untrained.STALE)
        nodes = [self.scored.nodes[name] for name in self._in_order(wanted)]
        rows = _weighted([self.maker.of_tree(nodes, trained)] if nodes else [])
        return SessionSamples(rows, self.ledger, stale=self.ledger.turns_with(Untrained.STALE))

    def _recent_turns(self) -> set[str]:
        """The selected turns that have no token to train older than `min_version`."""
        recent = set()
        for name in self.scored.selected:
            if self.options.freshness.is_recent(self._versions({name: self.ledger.open(name)})):
                recent.add(name)
            else:
                self.ledger.leave_out(name, Untrained.STALE)
        return recent

    def _versions(self, tokens: Mapping[str, BoolArray]) -> IntArray:
        """The weight versions of these output tokens, given as bool [output] by turn id (`Freshness.versions_of`)."""
        nodes, versions_of = self.scored.nodes, self.options.freshness.versions_of
        found = [versions_of(nodes[name].interaction)[trained] for name, trained in tokens.items()]
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    def _in_order(self, names: Collection[str]) -> list[str]:
        """These ids in order of `seq`."""
        return [name for name in self.scored.nodes if name in names]


def _up_to(leaf: Branch, names: Collection[str]) -> Iterator[str]:
    """The ids of a leaf and of the nodes above it that it is aligned with, up to but excluding one of `names`."""
    node: Branch | None = leaf
    while node is not None and node.interaction.id not in names:
        yield node.interaction.id
        node = node.parent if node.interaction.aligned else None


_RowT = TypeVar("_RowT", PathSample, TreeSample, PathSample | PaddedSample)


def _weighted(rows: Sequence[_RowT]) -> list[_RowT]:
    """Set the weights of a session's rows: 1 / (number of rows with a trained token), and 0 for the other rows."""
    trains = [row.is_trained for row in rows]
    share = 1.0 / max(sum(trains), 1)
    return [row.with_weight(share if train else 0.0) for row, train in zip(rows, trains, strict=True)]


def _masked_tokens(samples: Sequence[PathSample | PaddedSample]) -> int:
    """The number of sampled tokens of these samples' interactions that no sample contains as sampled."""
    missing: dict[str, BoolArray] = {}
    for place in (place for sample in samples for place in sample.placements):
        name = place.interaction.id
        missing[name] = missing.get(name, True) & ~place.in_sample
    return sum(int(tokens.sum()) for tokens in missing.values())
