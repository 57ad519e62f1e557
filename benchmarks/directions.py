"""Test whether the principal directions of a round's updates contain what clients share or what they disagree about.

    fedmpi run CONFIG 'analysis=[drift]'
    python benchmarks/directions.py RUN_DIR...

Computed from the norms and cosines in analysis.jsonl, for the updates G (m, d): v_l and lam_l are the eigenvectors and
eigenvalues of G'G / m. `lam`: lam_l divided by the sum of all, the weight that FedLD gives to direction l. `mean`: the
fraction of the squared norm of the mean update (FedAvg's step) along v_l. `signs`: signs of the clients' projections on
v_1.
"""

import json
import sys
from pathlib import Path

import numpy as np


def principal_directions(norms, cosines):
    """Return fractions of the eigenvalues (m,), of the mean update (m,), and signs of the projections on v_1 (m,).

    The arguments are the norms (m,) and the cosines (m, m) of the updates.
    """
    n, m = np.array(norms), len(norms)
    K = np.array(cosines) * np.outer(n, n)  # <g_i, g_j>
    lam, E = np.linalg.eigh(K / m)
    lam, E = lam[::-1].clip(min=0), E[:, ::-1]
    along = np.sqrt(m * lam) * E.mean(0)  # <mean g, v_l>, for v_l = G' E_l / sqrt(m lam_l) and K E_l = m lam_l E_l
    return lam / lam.sum(), along**2 / (along**2).sum(), np.sign(E[:, 0])


def main():
    """Run the benchmark with the arguments of the command line."""
    for run in map(Path, sys.argv[1:]):
        for row in map(json.loads, (run / "analysis.jsonl").read_text().splitlines()):
            lam, mean, signs = principal_directions(row["drift"]["norms"], row["drift"]["cosines"])
            shown = (" ".join(f"{value:.2f}" for value in each[:3]) for each in (lam, mean))
            lines = "lam {}  mean {}  signs ".format(*shown) + "".join("+" if s > 0 else "-" for s in signs)
            print(f"{run.name}, round {row['round']}: {lines}")


if __name__ == "__main__":
    main()
