"""KMeans whose centres live on a shelf: used in place, and durable after every iteration.

python examples/shelf.py [ITERATIONS]    # makes 10 iterations more; the second run resumes
"""

import sys

import numpy as np

from pccheck_async import Shelf

ITERATIONS = int(sys.argv[1]) if len(sys.argv) > 1 else 10

groups = np.random.default_rng(1)
samples = groups.permutation(groups.normal(size=(5, 8)).repeat(400, 0) * 5 + groups.normal(size=(2000, 8)))

with Shelf("kmeans.shelf", nbytes=1 << 20) as shelf:
    if "centres" in shelf:
        print(f"resumed after iteration {shelf.iteration}")
    else:
        print("starting from scratch")
        with shelf.transaction():  # all three, or none
            shelf["iteration"], shelf["distance"] = -1, np.inf
            shelf["centres"] = samples[:5]
    centres = shelf.centres  # the array in the file, not a copy
    for _ in range(ITERATIONS):
        squared = ((samples[:, None] - centres) ** 2).sum(2)
        with shelf.transaction("centres"):  # killed in here, the next run finds the iteration before
            for k in range(len(centres)):
                centres[k] = samples[squared.argmin(1) == k].mean(0)
            shelf["iteration"], shelf["distance"] = shelf.iteration + 1, float(squared.min(1).mean())
    print(f"iteration {shelf.iteration}: mean squared distance {shelf.distance:.3f}")
