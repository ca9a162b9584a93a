"""Balance a pole on a cart: the classical control problem of Barto, Sutton and Anderson (1983), in plain floats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH = 9.8, 1.0, 0.1, 0.5  # m/s^2, kg, kg, m
FORCE, SECONDS = 10.0, 0.02  # newtons per push, seconds per step
MOST_METRES, MOST_RADIANS, MOST_STEPS = 2.4, math.radians(12), 200


class CartPole:
    """Every step that the pole stands earns 1; an episode ends when it falls, the cart leaves, or after 200 steps.

    The state is four numbers (metres, metres/s, radians, radians/s), the steps so far, and the random generator.
    """

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.reset()

    def reset(self) -> None:
        self.place: list[float] = self.random.uniform(-0.05, 0.05, 4).tolist()
        self.steps = 0

    def push(self, right: bool) -> tuple[bool, bool]:
        """Push the cart for one step; return whether the pole fell (or the cart left), and whether time is up."""
        _, speed, angle, turning = self.place
        sine, cosine, mass = math.sin(angle), math.cos(angle), CART_MASS + POLE_MASS
        pull = ((FORCE if right else -FORCE) + POLE_MASS * HALF_LENGTH * turning**2 * sine) / mass
        falling = (GRAVITY * sine - cosine * pull) / (HALF_LENGTH * (4 / 3 - POLE_MASS * cosine**2 / mass))
        rolling = pull - POLE_MASS * HALF_LENGTH * falling * cosine / mass
        derivatives = (speed, rolling, turning, falling)
        self.place = [value + SECONDS * change for value, change in zip(self.place, derivatives, strict=True)]
        self.steps += 1
        fell = abs(self.place[0]) > MOST_METRES or abs(self.place[2]) > MOST_RADIANS
        return fell, self.steps >= MOST_STEPS

    def state_dict(self) -> dict[str, Any]:
        return {"place": list(self.place), "steps": self.steps, "random": self.random.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.steps = list(state["place"]), state["steps"]
        self.random.bit_generator.state = state["random"]
