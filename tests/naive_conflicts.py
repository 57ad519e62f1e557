"""A direct implementation of the projection of conflicting updates, as in FedGH's paper and FedLD's code."""


def literal_pairs(G):
    """Return the vectors in float64 after the projections of all pairs, applied one pair after another."""
    g = [row.copy() for row in G]
    for i in range(len(g)):
        for j in range(i + 1, len(g)):
            a, b = g[i].copy(), g[j].copy()
            if a @ b < 0:
                g[i] = a - (a @ b) / (b @ b) * b
                g[j] = b - (a @ b) / (a @ a) * a
    return g


def literal_hierarchy(G, history):
    g = [row.copy() for row in G]

    def cut(a, b, dot):
        return a - dot / (b @ b + 1e-7) * b

    while len(g) > 2:
        g.sort(key=lambda v: -(v @ history))
        new = []
        while len(g) > 1:
            a, b = g.pop(0), g.pop()
            dot = a @ b
            new.append(cut(a, b, dot) + cut(b, a, dot) if dot < 0 else a + b)
        g = new + g
    if len(g) == 2:
        dot = g[0] @ g[1]
        if dot < 0:
            g[0] = cut(g[0], g[1], dot)
            g[1] = cut(g[1], g[0], dot)
    return sum(g) / len(G)
