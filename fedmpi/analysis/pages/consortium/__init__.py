"""For those who take part, and those who let them: a page for each site, and a model card."""
