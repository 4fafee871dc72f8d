"""A session beside the others of its group: the advantages of its samples and turns.

A sample is compared by the scores that its session added to the group (`trajectory.scored_session`), so each of them
is one of the group's values. What is not compared has advantage 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from proxy.trajectory.advantages import Group, Groups, group_of
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.sample_row import Labels, Weighting
from proxy.trajectory.scored_session import ScoredSession
from proxy.trajectory.token_arrays import Placement
from proxy.types import Interaction
from tokengrove.options.export import Baseline
from tokengrove.options.session import RewardScope


@dataclass(frozen=True, slots=True)
class Comparison:
    """A session and the statistics of all `groups`. `options` say which advantages are asked for."""

    scored: ScoredSession
    groups: Groups
    options: LayoutOptions

    def weighting(self, places: Sequence[Placement], ends: Sequence[str]) -> Weighting:
        """The score and advantages of a sample on the paths with these `ends`. Its weight is set later, when all
        samples of the session are known.
        """
        options, scores, advantage, steps = self.options, self.scored.scores, None, None
        if options.advantages is not None:
            advantage = self.groups.advantage(self._group, scores.values(ends), options.advantages)
        if options.step_advantages is not None:
            steps = tuple(self._step_advantage(place.interaction, options.step_advantages) for place in places)
        return Weighting(scope=scores.scope, score=scores.of(ends), advantage=advantage, steps=steps)

    def entry(self) -> Labels:
        """What the session's entry in the export says about its score."""
        scores, record = self.scored.scores, self.scored.record
        found: Labels = {"reward_scope": scores.scope, "score": scores.score, "left_out": self.scored.left_out}
        if record.score is not None:
            found["episode_score"] = record.score
        if scores.scope is RewardScope.AGENT:
            found["agent_scores"] = {agent or "": score for agent, score in scores.agents.items()}
        if self.options.compares:
            found["group_members"] = self.groups.members(self._group, scores.peers)
        return found

    def warnings(self) -> Iterator[str]:
        """What may be read in two ways, or compares less than it seems to."""
        answers = self.scored.scores.answers
        if answers.overlapping is not None:
            yield (
                f"the answers {' and '.join(answers.overlapping)} to one prompt overlapped and were both rewarded, so "
                "they count as alternatives, each path by itself; 'reward_scope': session adds their rewards up"
            )
        elif answers.successive is not None:
            told = "the answers " + " and ".join(answers.successive) + " to one prompt came one after the other"
            if answers.are_alternatives:
                yield (
                    f"{told}, and others are choices of one request, so each path counts by itself; "
                    "'reward_scope': session adds the rewards up"
                )
            else:
                yield (
                    f"{told} and were both rewarded, so they count as steps and their rewards add up; "
                    "'reward_scope': path compares them"
                )
        if self.options.compares and self.scored.left_out is None:
            if self.groups.members(self._group, self.scored.scores.peers) == 1:
                yield "its group has no other score to compare with, so its advantage is 0; export the whole 'group_id'"
            if self.options.advantages is not None and (mixed := self.groups.mixed_scopes(self._group)):
                yield f"its group compares scores of different scopes: {mixed}; 'reward_scope' gives all the same"

    @property
    def _group(self) -> Group:
        return group_of(self.scored.record.session_id, self.scored.record.group_id)

    def _step_advantage(self, interaction: Interaction, baseline: Baseline) -> float:
        """The advantage of a turn among those of its state; 0 for a turn that is not compared."""
        if not self.scored.is_compared(interaction.id):
            return 0.0
        value = self.scored.returns[interaction.id]
        return self.groups.step_advantage(self._group, self.scored.state(interaction.id), value, baseline)
