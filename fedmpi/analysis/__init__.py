"""Measurements that explain the results of a run, such as its loss curvature or its cost: `fedmpi analyse NAME`."""
