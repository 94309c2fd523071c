"""Grid navigation ("MapFormer", Rambaud et al., 2025): a walk over cells that hold objects.

Each step is an action, followed by the content of the cell that it leads to. A model that tracks
its position can predict the content of a cell that it has visited before. Every sequence has a new
map, so maps cannot be memorized.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_tape.errors import ConfigError
from megatron_tape.synthetic.generator import Generator


@dataclass(frozen=True, kw_only=True)
class GridNavigation(Generator):
    """Sequences of `steps` pairs: an action, and the content of the cell that it leads to.

    The contents of revisited cells are the answers. The cell where the walk begins counts as
    visited only after a step has led to it. Token ids: the objects from 0 on, then the blank (an
    empty cell), then the actions, which are one step forward and one step back along each
    dimension.
    """

    task: Literal["grid_navigation"] = "grid_navigation"
    """The name of the task."""
    dimensions: int = 2
    """1 for a ring of cells, 2 for a torus."""
    steps: int = 128
    """Number of actions of a walk. A sequence has twice as many tokens."""
    width: int = 64
    """Number of cells along each dimension."""
    blank_probability: float = 0.5
    """Probability that a cell is empty, from 0 to 1."""
    objects: int = 16
    """Number of distinct objects in cells that are not empty."""
    longest_run: int | None = None
    """Maximum length of a run, which is a number of steps in one direction. Lengths of runs are
    uniform from 1 to this number. Default: 10 in one dimension, 3 in two."""

    def check(self) -> None:
        if self.dimensions not in (1, 2):
            raise ConfigError("dimensions", f"is {self.dimensions}", "set it to 1 or 2")
        self._require_at_least(steps=1, width=2, objects=1, longest_run=1)
        probability = self.blank_probability
        if not 0 <= probability <= 1:
            fix = "set it to a number from 0 to 1"
            raise ConfigError("blank_probability", f"is {probability}", fix)

    @property
    def vocab_size(self) -> int:
        return self.objects + 1 + 2 * self.dimensions

    @property
    def length(self) -> int:
        return 2 * self.steps

    @property
    def blank(self) -> int:
        """Id of the token for an empty cell."""
        return self.objects

    def sequence(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw a map and a walk over it."""
        actions, cells = self.walk(random)

        # The map: the content of each cell by its number.
        contents = random.integers(self.objects, size=self.width**self.dimensions)
        is_blank = random.random(len(contents)) < self.blank_probability
        contents[is_blank] = self.blank

        # One row per step: (action, content).
        action_ids = self.blank + 1 + actions
        tokens = np.stack([action_ids, contents[cells]], axis=1)
        answers = np.zeros(tokens.shape, dtype=bool)
        answers[:, 1] = visited_before(cells)
        return tokens.reshape(-1), answers.reshape(-1)

    def walk(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw a walk of T = `steps` steps; return the actions (T,) and the cells entered (T,).

        Action 2 d is a step forward along dimension d, action 2 d + 1 a step back.
        """
        longest = self.longest_run or {1: 10, 2: 3}[self.dimensions]
        # As many runs as steps are enough, since a run has at least one step.
        run_lengths = random.integers(1, longest + 1, size=self.steps)
        directions = random.integers(2 * self.dimensions, size=self.steps)
        actions = np.repeat(directions, run_lengths)[: self.steps]

        # Each step changes the coordinate of one dimension by 1 or, for odd actions, by -1.
        moves = np.zeros((self.steps, self.dimensions), dtype=np.int64)
        moves[np.arange(self.steps), actions // 2] = 1 - 2 * (actions % 2)
        start = random.integers(self.width, size=self.dimensions)
        # The grid has no borders: its opposite sides are joined.
        coordinates = (start + moves.cumsum(0)) % self.width

        # The number of cell (x, y) is x + width * y.
        return actions, coordinates @ self.width ** np.arange(self.dimensions)


def visited_before(cells: np.ndarray) -> np.ndarray:
    """Return a mask (T,): whether each of the `cells` (T,) of a walk was entered before."""
    _, first_visits = np.unique(cells, return_index=True)
    visited = np.ones(len(cells), dtype=bool)
    visited[first_visits] = False
    return visited
