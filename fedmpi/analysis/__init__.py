"""Measurements that help to explain results, such as the curvature of the loss or the cost (`fedmpi analyse`)."""
