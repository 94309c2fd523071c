"""Grid navigation ("MapFormer", Rambaud et al., 2025): a walk over a torus whose cells hold objects.

At every step an action is followed by what the new cell holds. Whoever keeps track of the position knows this for cells
that were visited before. Every sequence has a map of its own, so that nothing can be learnt by heart.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_tape.errors import refuse
from megatron_tape.synthetic.generator import Generator


@dataclass(frozen=True, kw_only=True)
class GridNavigation(Generator):
    """`steps` pairs of an action and the observation that follows; those of cells seen before are the answers.

    A cell is seen when a step enters it, so the cell in which the walk begins is not seen yet. Tokens: the objects from
    0 on, then the blank, then the actions: a step forward and back along each dimension.
    """

    task: Literal["grid_navigation"] = "grid_navigation"
    """The task."""
    dimensions: int = 2
    """1 for a ring of cells, 2 for a torus."""
    steps: int = 128
    """Actions of a walk; a sequence has twice as many tokens."""
    width: int = 64
    """Cells along each dimension."""
    blank_probability: float = 0.5
    """Share of the cells that hold nothing."""
    objects: int = 16
    """Different objects that the other cells hold."""
    longest_run: int | None = None
    """Steps for which a direction is kept at most: each run's length is drawn evenly from 1 to this; null means 10 in
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
        """The observation of a cell that holds nothing."""
        return self.objects

    def sequence(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw a map and a walk over it; what is seen again is an answer."""
        actions, cells = self.walk(random)
        held = random.integers(self.objects, size=self.width**self.dimensions)
        held[random.random(len(held)) < self.blank_probability] = self.blank
        answers = np.zeros(self.length, dtype=bool)
        answers[1::2] = visited_before(cells)
        return np.stack([self.blank + 1 + actions, held[cells]], axis=1).reshape(-1), answers

    def walk(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw the actions (T,) of a walk and the numbers (T,) of the cells that they lead to."""
        longest = self.longest_run or {1: 10, 2: 3}[self.dimensions]
        runs = random.integers(1, longest + 1, size=self.steps)
        directions = random.integers(2 * self.dimensions, size=self.steps)
        actions = np.repeat(directions, runs)[: self.steps]
        moves = np.zeros((self.steps, self.dimensions), dtype=np.int64)
        moves[np.arange(self.steps), actions // 2] = 1 - 2 * (actions % 2)
        places = (random.integers(self.width, size=self.dimensions) + moves.cumsum(0)) % self.width
        return actions, places @ self.width ** np.arange(self.dimensions)


def visited_before(cells: np.ndarray) -> np.ndarray:
    """Return for every cell (T,) of a walk whether it was visited earlier."""
    before = np.ones(len(cells), dtype=bool)
    before[np.unique(cells, return_index=True)[1]] = False
    return before
