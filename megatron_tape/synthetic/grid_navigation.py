"""Grid navigation ("MapFormer", Rambaud et al., 2025): a walk over a torus whose cells hold objects.

At every step, an action is followed by the content of the new cell. A model that tracks its position can predict this
for cells it has visited. Every sequence has its own map, so maps cannot be memorized.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_tape.errors import refuse
from megatron_tape.synthetic.generator import Generator


@dataclass(frozen=True, kw_only=True)
class GridNavigation(Generator):
    """`steps` pairs of an action and the resulting observation; observations of revisited cells are the answers.

    A cell counts as visited when a step enters it, so the cell where the walk begins does not. Tokens: the objects from
    0 on, then the blank, then the actions: one step forward and one back along each dimension.
    """

    task: Literal["grid_navigation"] = "grid_navigation"
    """The name of the task."""
    dimensions: int = 2
    """1 for a ring of cells, 2 for a torus."""
    steps: int = 128
    """Actions of a walk. A sequence has twice as many tokens."""
    width: int = 64
    """Cells along each dimension."""
    blank_probability: float = 0.5
    """Share of empty cells."""
    objects: int = 16
    """Number of distinct objects in the other cells."""
    longest_run: int | None = None
    """Maximum number of steps in one direction: the length of each run is uniform from 1 to this. The default is 10 in
    one dimension and 3 in two."""

    def check(self) -> None:
        refuse(self.dimensions not in (1, 2), "dimensions", f"is {self.dimensions}", "set it to 1 or 2")
        for key, least in (("steps", 1), ("width", 2), ("objects", 1), ("longest_run", 1)):
            value = getattr(self, key)
            refuse(value is not None and value < least, key, f"is {value}", f"set it to at least {least}")
        share = self.blank_probability
        refuse(not 0 <= share <= 1, "blank_probability", f"is {share}", "set it to at least 0 and at most 1")

    @property
    def vocab_size(self) -> int:
        return self.objects + 1 + 2 * self.dimensions

    @property
    def length(self) -> int:
        return 2 * self.steps

    @property
    def blank(self) -> int:
        """The observation of an empty cell."""
        return self.objects

    def sequence(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw a map and a walk over it; observations of revisited cells are answers."""
        actions, cells = self.walk(random)
        contents = random.integers(self.objects, size=self.width**self.dimensions)
        contents[random.random(len(contents)) < self.blank_probability] = self.blank
        answers = np.zeros(self.length, dtype=bool)
        answers[1::2] = visited_before(cells)
        return np.stack([self.blank + 1 + actions, contents[cells]], axis=1).reshape(-1), answers

    def walk(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw a walk; return its actions (T,) and the indices (T,) of the cells they lead to."""
        longest = self.longest_run or {1: 10, 2: 3}[self.dimensions]
        runs = random.integers(1, longest + 1, size=self.steps)
        directions = random.integers(2 * self.dimensions, size=self.steps)
        actions = np.repeat(directions, runs)[: self.steps]
        moves = np.zeros((self.steps, self.dimensions), dtype=np.int64)
        moves[np.arange(self.steps), actions // 2] = 1 - 2 * (actions % 2)
        places = (random.integers(self.width, size=self.dimensions) + moves.cumsum(0)) % self.width
        return actions, places @ self.width ** np.arange(self.dimensions)


def visited_before(cells: np.ndarray) -> np.ndarray:
    """Return whether each cell (T,) of a walk was visited earlier."""
    before = np.ones(len(cells), dtype=bool)
    before[np.unique(cells, return_index=True)[1]] = False
    return before
