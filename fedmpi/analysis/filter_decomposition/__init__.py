"""Measurements of what lies behind the figures of the paper on filter decomposition: `fedmpi analyse NAME`.

Chen, Qiu. Extra Clients at No Extra Cost: Overcome Data Heterogeneity in Federated Learning with Filter Decomposition.
2025. https://arxiv.org/abs/2503.08652
    variance        how much the aggregated kernels vary with sampling and local training               Fig. 3(b)
    virtual         the models alpha_i x D_j behind one aggregated model, each on the test set          Sec. 4.1, 6.7
    trajectory      both methods' ways over a loss landscape, with local and virtual clients            Fig. 4
    communication   a metric against the parameters transmitted                                         App., beta
    gaussians       averages of 5 and of 25 small linear models on their loss landscape                 Sec. 6.6
Everything runs in one process and writes NAME.json, and NAME.png where there is something to look at.
"""
